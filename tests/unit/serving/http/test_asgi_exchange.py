"""What an application sends is told once it is whole, with its length; what it hears ends with its caller."""

import asyncio

from serving.http.lookup_connection import AsgiCycle

START = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}


async def test_an_answer_in_pieces_is_sent_whole_with_its_length() -> None:
    cycle = AsgiCycle(b"")
    await cycle.send(START)
    await cycle.send({"type": "http.response.body", "body": b"one", "more_body": True})
    unfinished = cycle.complete_response()
    await cycle.send({"type": "http.response.body", "body": b"two"})

    assert unfinished is None
    answer = cycle.complete_response()
    assert answer is not None and answer[1] == b"onetwo"
    assert answer[0]["headers"] == [(b"a", b"b"), (b"content-length", b"6")]
    assert START["headers"] == [(b"a", b"b")]


async def test_a_given_length_is_not_added_twice() -> None:
    cycle = AsgiCycle(b"")
    length = (b"content-length", b"0")
    await cycle.send({**START, "headers": [length]})
    await cycle.send({"type": "http.response.body"})

    answer = cycle.complete_response()
    assert answer is not None and answer[0]["headers"] == [length]


def test_what_was_never_begun_is_no_answer() -> None:
    assert AsgiCycle(b"").complete_response() is None


async def test_the_body_comes_once_and_then_the_end_of_the_caller_whenever_it_comes() -> None:
    for is_early in (True, False):
        cycle = AsgiCycle(b"sent")
        first = await cycle.receive()
        if is_early:
            cycle.mark_lost()
        waiting = asyncio.ensure_future(cycle.receive())
        await asyncio.sleep(0)
        assert waiting.done() == is_early
        cycle.mark_lost()
        assert first == {"type": "http.request", "body": b"sent", "more_body": False}
        assert await waiting == {"type": "http.disconnect"}
