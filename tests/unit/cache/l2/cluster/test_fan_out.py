"""A batch over several nodes: who is asked what, how answers come together, and where redirections end."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import numpy as np
import pytest

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.cluster import REDIRECTS_MAX, CommandSlots, Scatter
from cache.l2.commands import (
    AskingCommand,
    Command,
    Frames,
    L2Result,
    Overlay,
    OverlayRead,
    Packer,
    PageRead,
    PageReads,
    unpack,
)
from cache.l2.errors import Redirected, error_from_reply, is_redirect

KEYS = Keyspace("default")
DOWN = TierUnavailable("down", reason="connection")


class FakeTier:
    """Keeps what it is asked until the test says what it answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.submissions: list[tuple[Sequence[Command], Callable[[Sequence[L2Result]], object]]] = []

    def submit(self, commands: Sequence[Command], keep: Callable[[Sequence[L2Result]], object]) -> None:
        self.submissions.append((commands, keep))

    def land(self, make: Callable[[Command], L2Result]) -> None:
        commands, keep = self.submissions.pop(0)
        keep([make(command) for command in commands])


class FakeNodes:
    """Even slots are a's, odd ones b's, unless one was learned."""

    def __init__(self) -> None:
        self.all = {name: FakeTier(name) for name in "abc"}
        self.learned: dict[int, str] = {}
        self.refreshes = 0
        self.unserved_slots: set[int] = set()

    def tier_of_slot(self, slot: int) -> FakeTier | None:
        if slot in self.unserved_slots:
            return None
        return self.all[self.learned.get(slot, "ab"[slot % 2])]

    def tier_at(self, address: str) -> FakeTier:
        return self.all[address]

    def learn(self, slot: int, address: str) -> None:
        self.learned[slot] = address

    def refresh_soon(self) -> None:
        self.refreshes += 1


@pytest.fixture
def nodes() -> FakeNodes:
    return FakeNodes()


def send(nodes: Any, commands: Sequence[Command], window_s: float = 60.0) -> Any:
    return Scatter(commands, list, nodes, CommandSlots(KEYS), window_s).send()


def reads(count: int) -> PageReads:
    return PageReads("g1", "t", list(range(count)), [8 * n for n in range(count)], 4)


def payload(command: Command) -> bytes:
    assert isinstance(command, PageRead)
    return b"%04d" % command.page_number


def moved(to: str, *, is_ask: bool = False) -> Callable[[Command], L2Result]:
    slots = CommandSlots(KEYS)
    return lambda command: Redirected("elsewhere", slot=slots.slot_of_command(command), address=to, is_ask=is_ask)


async def test_answers_come_together_in_the_order_of_the_reads(nodes: FakeNodes) -> None:
    result = send(nodes, reads(100))
    a, b = nodes.all["a"], nodes.all["b"]
    assert len(a.submissions) == len(b.submissions) == 1
    (mine, _), (reads_of_b, _) = a.submissions[0], b.submissions[0]
    assert isinstance(mine, PageReads) and len(mine) + len(reads_of_b) == 100
    assert all(CommandSlots(KEYS).slot_of_command(page_read) % 2 == 0 for page_read in mine)

    b.land(payload)
    assert not result.done()
    a.land(payload)

    assert await result == [b"%04d" % page for page in range(100)]
    assert [page_read.page_offset for page_read in mine] == [8 * page_read.page_number for page_read in mine]


async def test_frames_of_a_part_are_put_in_their_places(nodes: FakeNodes) -> None:
    result = send(nodes, reads(50))
    for tier in (nodes.all["a"], nodes.all["b"]):
        commands, keep = tier.submissions.pop()
        data = b"".join(b"$4\r\n%b\r\n" % payload(command) for command in commands)
        keep(Frames(data, len(commands), 4))
    assert await result == [b"%04d" % page for page in range(50)]


async def test_columns_of_all_parts_are_columns(nodes: FakeNodes) -> None:
    kept_answers: list[Sequence[L2Result]] = []
    result = Scatter(reads(50), kept_answers.append, nodes, CommandSlots(KEYS), 1.0).send()  # type: ignore[arg-type]
    for tier in (nodes.all["b"], nodes.all["a"]):
        commands, keep = tier.submissions.pop()
        leading_reply = b"$4\r\nskip\r\n"
        data = leading_reply + b"".join(b"$4\r\n%b\r\n" % payload(command) for command in commands)
        keep(Frames(data, len(commands) + 1, 4).select_range(1, len(commands)))
    await result
    (frames,) = kept_answers
    assert isinstance(frames, Frames)
    assert frames.to_records(np.dtype("S4")).tolist() == [b"%04d" % page for page in range(50)]


async def test_columns_next_to_a_dead_node_are_put_in_their_places(nodes: FakeNodes) -> None:
    result = send(nodes, reads(50))
    commands, keep = nodes.all["b"].submissions.pop()
    keep(Frames(b"".join(b"$4\r\n%b\r\n" % payload(command) for command in commands), len(commands), 4))
    nodes.all["a"].land(lambda _: DOWN)
    assert [
        DOWN if slot % 2 == 0 else b"%04d" % page
        for page, slot in enumerate(CommandSlots(KEYS).slots_of_commands(reads(50)))
    ] == await result


async def test_what_one_node_answers_alone_stays_as_it_is(nodes: FakeNodes) -> None:
    nodes.learned = dict.fromkeys(range(16_384), "a")
    kept_answers: list[Sequence[L2Result]] = []
    result = Scatter(reads(9), kept_answers.append, nodes, CommandSlots(KEYS), 1.0).send()  # type: ignore[arg-type]
    frames = Frames(b"$4\r\nabcd\r\n" * 9, 9, 4)
    nodes.all["a"].submissions[0][1](frames)
    await result
    assert kept_answers[0] is frames


async def test_a_dead_node_costs_only_its_own_keys(nodes: FakeNodes) -> None:
    result = send(nodes, reads(100))
    nodes.all["a"].land(lambda _: DOWN)
    nodes.all["b"].land(payload)
    answers, slots = await result, list(CommandSlots(KEYS).slots_of_commands(reads(100)))
    assert [answer is DOWN for answer in answers] == [slot % 2 == 0 for slot in slots]
    assert nodes.refreshes > 0


async def test_an_unserved_slot_is_a_miss_at_once(nodes: FakeNodes) -> None:
    nodes.unserved_slots = set(range(16_384))
    answers = await send(nodes, reads(3))
    assert all(isinstance(answer, TierUnavailable) for answer in answers) and nodes.refreshes


async def test_a_moved_key_is_read_where_it_is_now(nodes: FakeNodes) -> None:
    result = send(nodes, reads(20))
    nodes.all["b"].land(payload)
    nodes.all["a"].land(moved("c"))
    assert not result.done() and set(nodes.learned.values()) == {"c"}
    assert all(isinstance(command, PageRead) for command in nodes.all["c"].submissions[0][0])
    nodes.all["c"].land(payload)
    assert await result == [b"%04d" % page for page in range(20)]


async def test_a_key_on_its_way_is_asked_for_this_once(nodes: FakeNodes) -> None:
    read = PageRead("g1", "t", 0, 0, 4)
    result = send(nodes, [read])
    nodes.tier_of_slot(CommandSlots(KEYS).slot_of_command(read)).land(moved("c", is_ask=True))  # type: ignore[union-attr]
    assert nodes.all["c"].submissions[0][0] == [AskingCommand(read)] and not nodes.learned
    nodes.all["c"].land(lambda _: b"here")
    assert await result == [b"here"]


async def test_redirections_in_a_circle_end(nodes: FakeNodes) -> None:
    nodes.learned = dict.fromkeys(range(16_384), "a")
    result = send(nodes, reads(2))
    hops = 0
    while not result.done():
        nodes.all["a"].land(moved("a"))
        hops += 1
    assert hops == REDIRECTS_MAX + 1
    assert all(isinstance(answer, Redirected) for answer in await result)


async def test_redirections_end_with_their_window(nodes: FakeNodes) -> None:
    result = send(nodes, reads(20), window_s=0.0)
    nodes.all["b"].land(payload)
    nodes.all["a"].land(moved("c"))  # which never answers
    async with asyncio.timeout(30):
        answers = await result
    assert {type(answer) for answer in answers} == {bytes, Redirected}
    nodes.all["c"].land(payload)  # too late, and no harm


async def test_what_has_not_landed_when_the_window_ends_is_not_known(nodes: FakeNodes) -> None:
    result = send(nodes, reads(20), window_s=0.0)
    nodes.all["a"].land(moved("c"))
    async with asyncio.timeout(30):
        answers = await result
    assert all(isinstance(answer, TierUnavailable) for answer in answers)  # not even a key that is not there
    assert {answer.details["reason"] for answer in answers} == {"connection", "timeout"}


async def test_a_redirection_that_leads_nowhere_ends(nodes: FakeNodes) -> None:
    result = send(nodes, reads(20))
    nodes.all["b"].land(payload)
    nodes.all["a"].land(moved("no such node"))
    async with asyncio.timeout(30):
        answers = await result
    assert [type(answer) for answer in answers] == [TierUnavailable] * 20


async def test_a_caller_that_left_is_not_answered(nodes: FakeNodes) -> None:
    result = send(nodes, reads(20))
    result.cancel()
    nodes.all["a"].land(moved("c"))
    nodes.all["b"].land(payload)
    assert not nodes.all["c"].submissions


def test_a_redirection_says_where() -> None:
    moved_redirection = error_from_reply(hiredis.ReplyError("MOVED 3999 10.0.0.1:6381"))
    assert isinstance(moved_redirection, Redirected)
    assert (moved_redirection.slot, moved_redirection.address, moved_redirection.is_ask) == (
        3999,
        "10.0.0.1:6381",
        False,
    )
    for address in ("[2001:db8::1]:6381", "2001:db8::1:6381"):  # Redis writes it without brackets
        ask_redirection = error_from_reply(hiredis.ReplyError(f"ASK 3999 {address}"))
        assert isinstance(ask_redirection, Redirected) and ask_redirection.is_ask
        assert ask_redirection.address == "[2001:db8::1]:6381"


@pytest.mark.parametrize(
    "reply",
    [
        "MOVED 1 :6381", "MOVED 1 ?:1", "OOM command not allowed",
        "MOVED 1", "MOVED ", "MOVED 1 ", "MOVED ² 10.0.0.1:6381", "MOVED -1 10.0.0.1:6381",
        "MOVED 16384 10.0.0.1:6381", "MOVED 1 10.0.0.1:0", "MOVED 1 10.0.0.1:65536",
        "MOVED 1 10.0.0.1:٣", "MOVED 1 10.0.0.1", "MOVED 1 me@there/x?y=:1", "MOVED 1 a\x00b:1",
    ],
)  # fmt: skip
def test_a_refusal_that_says_nowhere_is_one(reply: str) -> None:
    assert type(error_from_reply(hiredis.ReplyError(reply))) is TierUnavailable
    assert is_redirect(hiredis.ReplyError(reply)) == reply.startswith("MOVED")


def test_every_part_of_a_command_is_preceded_by_asking() -> None:
    page, overlay = PageRead("g1", "t", 0, 0, 4), OverlayRead("g1", "t", "ab")
    packer = Packer(KEYS)
    packed, count = packer.pack([AskingCommand(overlay), AskingCommand(page)])
    packed_without_asking = packer.pack([overlay, page])[0]
    assert count == 6 and packed.count(b"ASKING") == 3
    assert packed.replace(b"*1\r\n$6\r\nASKING\r\n", b"") == packed_without_asking

    answers = unpack([AskingCommand(overlay), AskingCommand(page)], [b"OK", 1500, b"OK", b"value", b"OK", b"page"])
    assert answers == [Overlay(b"value", 1.5), b"page"]
