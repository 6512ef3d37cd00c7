"""Single lookups of one turn are answered as one batch, and each as if it had come alone."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from cache.errors import TierUnavailable
from cache.store.blocklist import Blocklist
from cache.tiers.addressing import reads_of
from precompute.config.settings import NightConfig
from serving.fast_lookup.coalescer import LEAST, MOST
from serving.lookup.entity import want_in
from tests.integration.http.hot_way import Asked, Sent, Ways, running
from tests.integration.nights import K, build_night, histories

TABLES = "user_topk", "user_vector", "user_affinity", "item_similar"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("together"), redis_url)


@pytest.fixture(scope="module")
def users(night: NightConfig) -> list[str]:
    return sorted(histories(night))


@pytest.fixture(params=["tasks", "joined"])
def ways(night: NightConfig, request: pytest.FixtureRequest) -> Iterator[Ways]:
    for found in running(night):
        found.joins = request.param == "joined"
        yield found
        assert found.service.admission.under_way == 0


@pytest.fixture(params=["tasks", "joined"])
def patient(night: NightConfig, request: pytest.FixtureRequest) -> Iterator[Ways]:
    """The same with time enough for Redis on a busy machine, where answers are compared and not clocks."""
    for found in running(night, l2_deadline_ms=2_500.0):
        found.joins = request.param == "joined"
        yield found


def get(user: str, query: bytes = b"", table: str = "user_topk") -> Asked:
    return Asked("GET", f"/v1/lookup/{table}/{quote(user, safe='')}".encode(), query)


def batches(ways: Ways) -> int:
    """Pipelines that went to Redis."""
    remote: Any = ways.service.tiers._remote
    return int(remote.stats.batches)


def test_a_turn_is_one_read_and_its_answers_are_those_of_the_routes(
    ways: Ways, users: list[str]
) -> None:
    asked = [get(user, b"k=20") for user in users[:40]]
    before = batches(ways)

    together = ways.ask_at_once(asked)

    assert batches(ways) - before == 1
    assert ways.joined == (len(asked) if ways.joins else 0)
    ways.forget()
    assert together == [ways.ask(each, hot=False) for each in asked]


def test_nobody_waits_for_company_unless_many_came_of_late(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = ways.hot._singles._together
    joined: list[str] = []
    ask = together.ask

    def watched(one: Any) -> Any:
        joined.append(one.asked.id)
        return ask(one)

    monkeypatch.setattr(together, "ask", watched)

    async def wave(names: list[str]) -> None:
        await asyncio.gather(*(ways.alone(_scope(name)) for name in names))
        while together._is_open:  # noqa: ASYNC110 - a few turns
            await asyncio.sleep(0)

    ways.runner.run(wave(users[:1]))
    ways.runner.run(wave(users[1 : 2 + LEAST]))
    assert not joined

    ways.runner.run(wave(users[40 : 40 + LEAST]))
    assert joined == users[40 : 40 + LEAST]

    for user in users[60:66]:
        ways.runner.run(wave([user]))
    assert joined == [*users[40 : 40 + LEAST], users[60]]


def test_whatever_is_asked_in_a_turn_is_answered_as_by_the_routes(
    patient: Ways, users: list[str]
) -> None:
    """Tables, lengths, ids that nobody knows, that come twice, that need quoting: from Redis, from L1, ready."""
    items = [f"i-{number:05d}" for number in range(30)]
    asked = [
        get(id_, query, table)
        for table in TABLES
        for query in (b"", b"k=3")
        for id_ in [
            *(items if table == "item_similar" else users[:30]),
            users[0], items[0], "nobody", 'q"\\', "team/57/a",
        ]
    ]  # fmt: skip
    together = [patient.ask_at_once(asked) for _ in range(3)]
    behind = [patient.ask(each, hot=False) for each in asked]

    # One by one, the second question about a record finds it in L1.
    assert b'"source":"l2"' in together[0][0].body
    for sent in together:
        pairs = [(_of_l1(one), _of_l1(other)) for one, other in zip(sent, behind, strict=True)]
        assert [each for each in pairs if each[0] != each[1]] == []


def _of_l1(sent: Sent) -> tuple[int, bytes]:
    return sent.status, sent.body.replace(b'"source":"l2"', b'"source":"l1"')


def test_more_than_a_group_holds_are_several_groups(ways: Ways, users: list[str]) -> None:
    asked = [get(user, b"k=5") for user in (users * 3)[: 2 * MOST + 10]]

    together = ways.ask_at_once(asked)

    assert {sent.status for sent in together} == {200}
    assert [json.loads(sent.body)["id"] for sent in together] == (users * 3)[: len(asked)]


def test_each_request_of_a_turn_is_counted_once(ways: Ways, users: list[str]) -> None:
    asked = [get(user) for user in [*users[:30], "nobody", "nothing"]]
    for _ in range(3):
        ways.ask_at_once(asked)

    assert sum(ways.scraped("larder_entities_total").values()) == 96
    assert sum(ways.scraped("larder_answers_total").values()) == 96
    assert sum(ways.scraped("larder_answer_seconds_count").values()) == 96
    assert sum(ways.scraped("larder_requests_total").values()) == 96
    assert sum(ways.scraped("larder_misses_total").values()) == 6
    assert ways.service.tiers.counters.total == 96
    recent = list(ways.service.ladder.recent)
    assert recent.count(("user_topk", users[7].encode())) == 3


def test_a_caller_that_leaves_takes_nobody_along_and_is_not_counted(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = ways.hot._singles._together
    together._expected = LEAST

    async def turn() -> list[object]:
        tasks = [asyncio.ensure_future(ways.alone(_scope(user))) for user in users[: 2 * LEAST]]
        tell = together._tell

        async def leaving(*known: Any) -> None:
            asyncio.get_running_loop().call_soon(tasks[3].cancel)
            await tell(*known)

        monkeypatch.setattr(together, "_tell", leaving)
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = ways.runner.run(turn())

    assert isinstance(found[3], asyncio.CancelledError)
    assert all(isinstance(each, tuple) for place, each in enumerate(found) if place != 3)
    answers, requests = ways.service.metrics.tally.take()
    assert sum(answers.values()) == sum(requests.values()) == 2 * LEAST - 1
    assert not together._tasks and not len(ways.service.tiers.flights)


def _scope(user: str) -> dict[str, Any]:
    path = f"/v1/lookup/user_topk/{quote(user, safe='')}".encode()
    return {"raw_path": path, "query_string": b"k=5", "headers": []}


def test_who_has_less_time_than_a_read_may_take_has_a_clock_of_its_own(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it joins, and where what is under way has grown since it did."""
    read_as_rows: list[int] = []
    get_rows = ways.service.tiers.get_rows

    async def watched(view: Any, wants: Any, deadline: float | None) -> Any:
        read_as_rows.append(len(wants))
        return await get_rows(view, wants, deadline)

    monkeypatch.setattr(ways.service.tiers, "get_rows", watched)
    hasty = b"k=5&deadline_ms=%d" % int(900 * ways.service.l2_bound_s())
    asked = [get(user, hasty if place % 2 else b"k=5") for place, user in enumerate(users[:40])]

    assert {sent.status for sent in ways.ask_at_once(asked)} == {200}
    assert len(read_as_rows) == 1 and 0 < read_as_rows[0] <= 20

    ways.forget()
    together = ways.hot._singles._together
    monkeypatch.setattr(together, "_still_have_time", lambda _members: False)
    assert {sent.status for sent in ways.ask_at_once(asked)} == {200}
    assert len(read_as_rows) == 1


def test_without_redis_each_goes_down_the_ladder_with_its_reason(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote: Any = ways.service.tiers._remote
    down = TierUnavailable("gone", reason="connection")

    def submit(reads: Any, keep: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(keep([down] * len(reads)))
        return future

    monkeypatch.setattr(remote, "submit", submit)
    bodies = [json.loads(sent.body) for sent in ways.ask_at_once([get(u) for u in users[:20]])]

    assert {(each["source"], each["reason"]) for each in bodies} == {("default", "l2_down")}
    assert [each["id"] for each in bodies] == users[:20]
    assert sum(ways.scraped("larder_misses_total").values()) == 20
    assert ways.service.tiers.counters.total == 20


def test_what_fails_together_is_answered_alone(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[bytes]:
        raise RuntimeError("a defect")

    monkeypatch.setattr("serving.fast_lookup.coalescer.texts_of", broken)
    bodies = [json.loads(sent.body) for sent in ways.ask_at_once([get(u) for u in users[:20]])]

    assert [each["id"] for each in bodies] == users[:20]
    assert {each["source"] for each in bodies} <= {"l1", "l2"}


def test_a_turn_over_a_flip_mixes_nothing(ways: Ways, users: list[str]) -> None:
    """Each request is answered from what it captured."""
    shelf = ways.service.follower.shelf
    old = ways.service.holding()
    new = dataclasses.replace(old, live=old.live.released_as(old.live.epoch + 1, 1_800_000_000.0))
    hot = ways.hot
    hot._singles._together._expected = LEAST

    async def turn() -> list[Any]:
        loop = asyncio.get_running_loop()
        first = [loop.create_task(ways.alone(_scope(user))) for user in users[:10]]
        loop.call_soon(setattr, shelf, "holding", new)
        second = [loop.create_task(ways.alone(_scope(user))) for user in users[:10]]
        return await asyncio.gather(*first, *second)

    try:
        found = [json.loads(answer[1]["body"]) for answer in ways.runner.run(turn())]
    finally:
        shelf.holding = old

    told = [each["published_at"] for each in found]
    assert told == [old.live.published_at] * 10 + [new.live.published_at] * 10


@pytest.mark.parametrize(
    ("at", "raw"),
    [
        (0, b"\x00" * 8),  # somebody else's
        (14, b"\x20"),  # another format
        (14, b"\x11"),  # a live record
        (12, b"\x03\x00"),  # three items left
        (12, b"\x00\x00"),  # none
        (16 + 4 * K, b"\x00\x7e"),  # not a number
    ],
)
def test_a_damaged_record_costs_nobody_else_an_answer(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch, at: int, raw: bytes
) -> None:
    live = ways.service.holding().live
    want = want_in(live, live.manifest.tables["user_topk"], users[8].encode())
    (bad,) = reads_of(live.view, [want])
    remote: Any = ways.service.tiers._remote
    read = remote.submit

    def submit(reads: Any, keep: Any) -> Any:
        named = list(reads)

        def spoilt(answers: Any) -> Any:
            return keep(
                [
                    each[:at] + raw + each[at + len(raw) :] if of == bad else each
                    for of, each in zip(named, answers, strict=True)
                ]
            )

        return read(reads, spoilt)

    monkeypatch.setattr(remote, "submit", submit)
    asked = [get(user, b"k=20") for user in users[:20]]
    together = ways.ask_at_once(asked)
    ways.forget()

    # Whom the hot route leaves to the ladder finds in L1 what it has just read.
    behind = [ways.ask(each, hot=False) for each in asked]
    assert [_of_l1(each) for each in together] == [_of_l1(each) for each in behind]


def test_what_lies_in_memory_waits_for_no_read(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways.ask(get(users[3], b"k=7"))
    remote: Any = ways.service.tiers._remote
    monkeypatch.setattr(remote, "submit", lambda *_: asyncio.get_running_loop().create_future())

    async def turn() -> list[bool]:
        ways.hot._singles._together._expected = LEAST
        tasks = [asyncio.ensure_future(ways.alone(_scope(user))) for user in users[:10]]
        for _ in range(20):
            await asyncio.sleep(0)
        done = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        for task in ways.hot._singles._together._tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert ways.runner.run(turn()) == [place == 3 for place in range(10)]


def test_what_is_blocked_is_gone_from_a_turn(ways: Ways, users: list[str]) -> None:
    asked = [get(user, b"k=5") for user in users[:20]]
    barred = json.loads(ways.ask(asked[0]).body)["items"][0].encode()
    blocklist = Blocklist(1, frozenset({barred}), entities=frozenset({users[5].encode()}))
    ways.runner.run(ways.service.follower.shelf.block(blocklist))

    ways.forget()
    together = ways.ask_at_once(asked)
    ways.forget()
    assert together == [ways.ask(each, hot=False) for each in asked]
    assert json.loads(together[5].body)["reason"] == "entity_blocked"
