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
from cache.tiers.reads import reads_of
from precompute.config.settings import NightConfig
from serving.engine.coalescer import GROUP_SIZE_MAX, GROUP_SIZE_MIN
from serving.engine.entity import find_record_key
from tests.integration.http.hot_way import AsgiRequest, AsgiResponse, Ways, running
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
    for running_ways in running(night):
        running_ways.joins = request.param == "joined"
        yield running_ways
        assert running_ways.service.admission.requests_under_way == 0


@pytest.fixture(params=["tasks", "joined"])
def patient(night: NightConfig, request: pytest.FixtureRequest) -> Iterator[Ways]:
    """The same with time enough for Redis on a busy machine, where answers are compared and not clocks."""
    for running_ways in running(night, l2_deadline_ms=2_500.0):
        running_ways.joins = request.param == "joined"
        yield running_ways


def get(user: str, query: bytes = b"", table: str = "user_topk") -> AsgiRequest:
    return AsgiRequest("GET", f"/v1/lookup/{table}/{quote(user, safe='')}".encode(), query)


def batches(ways: Ways) -> int:
    """Pipelines that went to Redis."""
    remote: Any = ways.service.tiers._remote
    return int(remote.stats.sent_pipelines)


def test_a_turn_is_one_read_and_its_answers_are_those_of_the_routes(ways: Ways, users: list[str]) -> None:
    requests = [get(user, b"k=20") for user in users[:40]]
    batches_before = batches(ways)

    grouped_responses = ways.ask_at_once(requests)

    assert batches(ways) - batches_before == 1
    assert ways.joined == (len(requests) if ways.joins else 0)
    ways.forget()
    assert grouped_responses == [ways.send(request, is_fast=False) for request in requests]


def test_a_request_waits_for_company_only_if_many_came_of_late(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coalescer = ways.fast_lookups._single_lookups._coalescer
    joined: list[str] = []
    join = coalescer.join

    def watched(request: Any) -> Any:
        joined.append(request.lookup.id)
        return join(request)

    monkeypatch.setattr(coalescer, "join", watched)

    async def wave(names: list[str]) -> None:
        await asyncio.gather(*(ways.alone(_scope(name)) for name in names))
        while coalescer._is_iteration_open:  # noqa: ASYNC110 - a few turns
            await asyncio.sleep(0)

    ways.runner.run(wave(users[:1]))
    ways.runner.run(wave(users[1 : 2 + GROUP_SIZE_MIN]))
    assert not joined

    ways.runner.run(wave(users[40 : 40 + GROUP_SIZE_MIN]))
    assert joined == users[40 : 40 + GROUP_SIZE_MIN]

    for user in users[60:66]:
        ways.runner.run(wave([user]))
    assert joined == [*users[40 : 40 + GROUP_SIZE_MIN], users[60]]


def test_whatever_is_asked_in_a_turn_is_answered_as_by_the_routes(patient: Ways, users: list[str]) -> None:
    """Tables, lengths, ids that nobody knows, that come twice, that need quoting: from Redis, from L1, ready."""
    items = [f"i-{number:05d}" for number in range(30)]
    requests = [
        get(id_, query, table)
        for table in TABLES
        for query in (b"", b"k=3")
        for id_ in [
            *(items if table == "item_similar" else users[:30]),
            users[0], items[0], "nobody", 'q"\\', "team/57/a",
        ]
    ]  # fmt: skip
    response_rounds = [patient.ask_at_once(requests) for _ in range(3)]
    behind = [patient.send(request, is_fast=False) for request in requests]

    # One by one, the second request for a record finds it in L1.
    assert b'"source":"l2"' in response_rounds[0][0].body
    for grouped_responses in response_rounds:
        pairs = [
            (_of_l1(grouped_response), _of_l1(routed_response))
            for grouped_response, routed_response in zip(grouped_responses, behind, strict=True)
        ]
        assert [pair for pair in pairs if pair[0] != pair[1]] == []


def _of_l1(response: AsgiResponse) -> tuple[int, bytes]:
    return response.status, response.body.replace(b'"source":"l2"', b'"source":"l1"')


def test_more_than_a_group_holds_are_several_groups(ways: Ways, users: list[str]) -> None:
    requests = [get(user, b"k=5") for user in (users * 3)[: 2 * GROUP_SIZE_MAX + 10]]

    grouped_responses = ways.ask_at_once(requests)

    assert {response.status for response in grouped_responses} == {200}
    assert [json.loads(response.body)["id"] for response in grouped_responses] == (users * 3)[: len(requests)]


def test_every_request_of_a_loop_iteration_is_counted_once(ways: Ways, users: list[str]) -> None:
    requests = [get(user) for user in [*users[:30], "nobody", "nothing"]]
    for _ in range(3):
        ways.ask_at_once(requests)

    assert sum(ways.scraped("larder_entities_total").values()) == 96
    assert sum(ways.scraped("larder_answers_total").values()) == 96
    assert sum(ways.scraped("larder_answer_seconds_count").values()) == 96
    assert sum(ways.scraped("larder_requests_total").values()) == 96
    assert sum(ways.scraped("larder_misses_total").values()) == 6
    assert ways.service.tiers.counters.result_total == 96
    recent = list(ways.service.ladder.recent_names)
    assert recent.count(("user_topk", users[7].encode())) == 3


def test_a_caller_that_leaves_takes_no_others_along_and_is_not_counted(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coalescer = ways.fast_lookups._single_lookups._coalescer
    coalescer._expected_arrivals = GROUP_SIZE_MIN

    async def run_iteration() -> list[object]:
        tasks = [asyncio.ensure_future(ways.alone(_scope(user))) for user in users[: 2 * GROUP_SIZE_MIN]]
        resolve_group = coalescer._resolve_group

        async def leaving(*arguments: Any) -> None:
            asyncio.get_running_loop().call_soon(tasks[3].cancel)
            await resolve_group(*arguments)

        monkeypatch.setattr(coalescer, "_resolve_group", leaving)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = ways.runner.run(run_iteration())

    assert isinstance(outcomes[3], asyncio.CancelledError)
    assert all(isinstance(outcome, tuple) for index, outcome in enumerate(outcomes) if index != 3)
    answers, requests = ways.service.metrics.tally.drain()
    assert sum(answers.values()) == sum(requests.values()) == 2 * GROUP_SIZE_MIN - 1
    assert not coalescer._group_tasks and not len(ways.service.tiers.flights)


def _scope(user: str) -> dict[str, Any]:
    path = f"/v1/lookup/user_topk/{quote(user, safe='')}".encode()
    return {"raw_path": path, "query_string": b"k=5", "headers": []}


def test_who_has_less_time_than_a_read_may_take_has_a_clock_of_its_own(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it joins, and where what is under way has grown since it did."""
    read_as_rows: list[int] = []
    get_rows = ways.service.tiers.get_rows

    async def watched(view: Any, record_keys: Any, deadline: float | None) -> Any:
        read_as_rows.append(len(record_keys))
        return await get_rows(view, record_keys, deadline)

    monkeypatch.setattr(ways.service.tiers, "get_rows", watched)
    hasty = b"k=5&deadline_ms=%d" % int(900 * ways.service.l2_bound_s())
    requests = [get(user, hasty if index % 2 else b"k=5") for index, user in enumerate(users[:40])]

    assert {response.status for response in ways.ask_at_once(requests)} == {200}
    assert len(read_as_rows) == 1 and 0 < read_as_rows[0] <= 20

    ways.forget()
    coalescer = ways.fast_lookups._single_lookups._coalescer
    monkeypatch.setattr(coalescer, "_has_time_for_group", lambda _members: False)
    assert {response.status for response in ways.ask_at_once(requests)} == {200}
    assert len(read_as_rows) == 1


def test_without_redis_every_request_goes_down_the_ladder_with_its_reason(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote: Any = ways.service.tiers._remote
    down = TierUnavailable("gone", reason="connection")

    def submit(reads: Any, keep: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(keep([down] * len(reads)))
        return future

    monkeypatch.setattr(remote, "submit", submit)
    bodies = [json.loads(response.body) for response in ways.ask_at_once([get(u) for u in users[:20]])]

    assert {(body["source"], body["reason"]) for body in bodies} == {("default", "l2_down")}
    assert [body["id"] for body in bodies] == users[:20]
    assert sum(ways.scraped("larder_misses_total").values()) == 20
    assert ways.service.tiers.counters.result_total == 20


def test_what_fails_together_is_answered_alone(ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[bytes]:
        raise RuntimeError("a defect")

    monkeypatch.setattr("serving.engine.coalescer.answer_texts", broken)
    bodies = [json.loads(response.body) for response in ways.ask_at_once([get(u) for u in users[:20]])]

    assert [body["id"] for body in bodies] == users[:20]
    assert {body["source"] for body in bodies} <= {"l1", "l2"}


def test_a_turn_over_a_flip_mixes_nothing(ways: Ways, users: list[str]) -> None:
    """Each request is answered from what it captured."""
    holder = ways.service.follower.holder
    old = ways.service.capture_served()
    new = dataclasses.replace(old, live=old.live.released_as(old.live.epoch + 1, 1_800_000_000.0))
    fast_lookups = ways.fast_lookups
    fast_lookups._single_lookups._coalescer._expected_arrivals = GROUP_SIZE_MIN

    async def run_iteration() -> list[Any]:
        loop = asyncio.get_running_loop()
        first = [loop.create_task(ways.alone(_scope(user))) for user in users[:10]]
        loop.call_soon(setattr, holder, "served", new)
        second = [loop.create_task(ways.alone(_scope(user))) for user in users[:10]]
        return await asyncio.gather(*first, *second)

    try:
        answers = [json.loads(answer[1]["body"]) for answer in ways.runner.run(run_iteration())]
    finally:
        holder.served = old

    publication_times = [answer["published_at"] for answer in answers]
    assert publication_times == [old.live.published_at] * 10 + [new.live.published_at] * 10


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
def test_a_damaged_record_costs_no_other_request_an_answer(
    ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch, at: int, raw: bytes
) -> None:
    live = ways.service.capture_served().live
    record_key = find_record_key(live, live.manifest.tables["user_topk"], users[8].encode())
    (damaged_read,) = reads_of(live.view, [record_key])
    remote: Any = ways.service.tiers._remote
    read = remote.submit

    def submit(reads: Any, keep: Any) -> Any:
        named = list(reads)

        def spoilt(answers: Any) -> Any:
            return keep(
                [
                    record[:at] + raw + record[at + len(raw) :] if of == damaged_read else record
                    for of, record in zip(named, answers, strict=True)
                ]
            )

        return read(reads, spoilt)

    monkeypatch.setattr(remote, "submit", submit)
    requests = [get(user, b"k=20") for user in users[:20]]
    grouped_responses = ways.ask_at_once(requests)
    ways.forget()

    # A request that the hot route leaves to the ladder finds in L1 what the route has just read.
    behind = [ways.send(request, is_fast=False) for request in requests]
    assert [_of_l1(response) for response in grouped_responses] == [_of_l1(response) for response in behind]


def test_what_lies_in_memory_waits_for_no_read(ways: Ways, users: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ways.send(get(users[3], b"k=7"))
    remote: Any = ways.service.tiers._remote
    monkeypatch.setattr(remote, "submit", lambda *_: asyncio.get_running_loop().create_future())

    async def run_iteration() -> list[bool]:
        ways.fast_lookups._single_lookups._coalescer._expected_arrivals = GROUP_SIZE_MIN
        tasks = [asyncio.ensure_future(ways.alone(_scope(user))) for user in users[:10]]
        for _ in range(20):
            await asyncio.sleep(0)
        done_flags = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        for task in ways.fast_lookups._single_lookups._coalescer._group_tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done_flags

    assert ways.runner.run(run_iteration()) == [index == 3 for index in range(10)]


def test_what_is_blocked_is_gone_from_a_turn(ways: Ways, users: list[str]) -> None:
    requests = [get(user, b"k=5") for user in users[:20]]
    blocked_item = json.loads(ways.send(requests[0]).body)["items"][0].encode()
    blocklist = Blocklist(1, frozenset({blocked_item}), entities=frozenset({users[5].encode()}))
    ways.runner.run(ways.service.follower.holder.put_own_blocklist_in_force(blocklist))

    ways.forget()
    grouped_responses = ways.ask_at_once(requests)
    ways.forget()
    assert grouped_responses == [ways.send(request, is_fast=False) for request in requests]
    assert json.loads(grouped_responses[5].body)["reason"] == "entity_blocked"
