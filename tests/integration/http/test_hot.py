"""The hot route answers as the routes behind it do, to the byte, and keeps every rule that they keep."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import quote

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from cache.store.blocklist import Blocklist
from cache.store.releases import Canary
from cache.tiers.l1 import LocalKey
from precompute.config.settings import NightConfig
from serving.admission import gate
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client.calls import write_arrow_ids
from serving.engine import batch_lookup
from serving.engine.entity import find_record_key
from serving.requests import parsing
from tests.integration.http.hot_way import AsgiRequest, Ways, running
from tests.integration.nights import K, build_night, histories

QUIET = example_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("hot"), redis_url)


@pytest.fixture(scope="module")
def users(night: NightConfig) -> list[str]:
    return sorted(histories(night))


@pytest.fixture
def ways(night: NightConfig) -> Iterator[Ways]:
    yield from running(night)


@pytest.fixture(scope="module")
def long_lived(night: NightConfig) -> Iterator[Ways]:
    """For the generated requests: nothing but L1 changes under them."""
    yield from running(night)


def get(user: str, query: bytes = b"", table: str = "user_topk", **more: object) -> AsgiRequest:
    path = f"/v1/lookup/{table}/{quote(user, safe='')}".encode()
    return AsgiRequest("GET", path, query, **more)  # type: ignore[arg-type]


def post(body: object, table: str = "user_topk", **more: object) -> AsgiRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return AsgiRequest("POST", f"/v1/lookup/{table}".encode(), pieces=(raw,), **more)  # type: ignore[arg-type]


TABLES = st.sampled_from(
    ["user_topk", "user_vector", "item_vector", "item_similar", "user_affinity", "nothing", "a%62"]
)
IDS = st.one_of(
    st.integers(0, 420).map(lambda number: f"u-{number:05d}"),
    st.integers(0, 130).map(lambda number: f"i-{number:05d}"),
    st.sampled_from(["0000007", "team/57/a", "zoë-107", "用户 157"]),
    st.text(max_size=6),
    st.sampled_from(["", "x" * 257, "ü/%", "a\nb", 'q"\\', "no-such"]),
)
QUERIES = st.sampled_from(
    [b"", b"", b"k=5", b"k=20", b"k=50", b"k=51", b"k=0", b"k=x", b"k=1&k=2", b"fresh=true", b"deadline_ms=900",
     b"deadline_ms=0", b"k=3&deadline_ms=900", b"generation=none", b"max_age_seconds=1", b"canary_key=u", b"z=1",
     b"k=%35", b"k"]
)  # fmt: skip
HEADERS = st.lists(
    st.sampled_from(
        [(b"x-deadline-ms", b"800"), (b"x-deadline-ms", b"0"), (b"x-deadline-ms", b"1e2"), (b"accept", b"*/*"),
         (b"x-deadline-ms", b"nan"), (b"x-larder-canary-key", b"u"), (b"x-larder-canary-key", b""),
         (b"x-larder-canary-key", b"x" * 300), (b"x-larder-canary-key", b"\xff"), (b"authorization", b"Bearer x")]
    ),
    max_size=2,
).map(tuple)  # fmt: skip


@st.composite
def gets(draw: st.DrawFn) -> AsgiRequest:
    path = f"/v1/lookup/{draw(TABLES)}/{quote(draw(IDS), safe=draw(st.sampled_from(['', '/'])))}"
    return AsgiRequest("GET", path.encode(), draw(QUERIES), draw(HEADERS))


ITEMS = st.integers(0, 130).map(lambda number: f"i-{number:05d}")
# Answers for unknown ids are stored, and the second path would find them. Users 7 and 57 have other names.
KNOWN_NUMBERS = st.integers(0, 105).filter(lambda number: number not in (7, 57))
WITH_INPUT = st.one_of(
    st.fixed_dictionaries(
        {"id": KNOWN_NUMBERS.map(lambda number: f"u-{number:05d}")},
        optional={"history": st.lists(ITEMS, max_size=5), "features": st.just({"age": 1})},
    ),
    st.fixed_dictionaries({"id": st.just("nobody")}, optional={"history": st.lists(st.just("no-item"), max_size=2)}),
    st.sampled_from([{"history": 7}, {"id": 1.5, "history": []}, {"id": "x", "other": 1}, {}]),
)
BODIES = st.one_of(
    st.fixed_dictionaries(
        {"entities": st.lists(IDS, max_size=8)},
        optional={"k": st.sampled_from([1, 5, K, K + 1, 0, -1, True, 2.0, None, "5"])},
    ),
    st.fixed_dictionaries(
        {"entities": st.lists(st.one_of(IDS, st.integers(-2, 9), st.none()), max_size=4)},
        optional={
            "exclude": st.lists(IDS, max_size=3),
            "deadline_ms": st.sampled_from([900, 0]),
            "generation": st.just("none"),
            "other": st.just(1),
        },
    ),
    st.sampled_from([[], "x", {"entities": "x"}, {"entities": [{"id": "u-00001"}], "k": 3}, {}]),
    st.fixed_dictionaries(
        {"entities": st.lists(WITH_INPUT, min_size=1, max_size=4)},
        optional={
            "k": st.sampled_from([1, 5, K, K + 1]),
            "exclude": st.lists(ITEMS, max_size=3),
            "fresh": st.booleans(),
            "max_age_seconds": st.sampled_from([0, 1, -1]),
        },
    ),
)


@st.composite
def posts(draw: st.DrawFn) -> AsgiRequest:
    raw = draw(st.one_of(BODIES.map(orjson.dumps), st.sampled_from([b"", b"{", b'{"entities":["\\ud800"]}'])))
    cut = draw(st.integers(0, len(raw)))
    path = draw(st.one_of(TABLES.map(lambda table: f"/v1/lookup/{table}"), st.just("/v1/lookup")))
    return AsgiRequest("POST", path.encode(), draw(QUERIES), draw(HEADERS), (raw[:cut], raw[cut:]))


@QUIET
@given(http_request=st.one_of(gets(), posts()))
def test_both_ways_send_the_same_bytes(long_lived: Ways, http_request: AsgiRequest) -> None:
    fast_responses, slow = long_lived.send_both_ways(http_request)

    assert fast_responses == slow


def test_known_ids_take_the_hot_way_from_redis_from_memory_and_ready(ways: Ways, users: list[str]) -> None:
    """Without it the comparison above would compare the routes with themselves."""
    lookup_requests = [get(users[0], b"k=20"), post({"entities": users[:300], "k": 20})]
    for request in lookup_requests:
        for source in (b'"source":"l2"', b'"source":"l1"', b'"source":"l1"'):
            ways.service.metrics.tally.drain()
            response = ways.send(request)
            _, requests = ways.service.metrics.tally.drain()
            assert response.status == 200 and source in response.body
            assert sum(requests.values()) == 1
        ways.forget()
    ways.send(lookup_requests[0])
    ways.send(lookup_requests[0])
    assert ways.service.tiers.local_tier.find_ready_answer(lookup_requests[0].path + b"?k=20") is not None


def test_a_stranger_with_a_history_takes_the_hot_way(ways: Ways, users: list[str]) -> None:
    stranger = {"id": "stranger-of-the-hot-way", "history": ["i-00001", "i-00002"]}
    ways.service.metrics.tally.drain()

    response = ways.send(post({"entities": [stranger, users[0]], "k": 5, "exclude": ["i-00003"]}))

    _, requests = ways.service.metrics.tally.drain()
    answers = json.loads(response.body)["answers"]
    assert [answer["source"] for answer in answers] == ["live", "l2"]
    assert sum(requests.values()) == 1


def test_whole_batches_are_the_same_both_ways(ways: Ways, users: list[str]) -> None:
    """With ids that the night does not know among them, and ids that come twice."""
    mixed = [*users[:200], "nobody", *users[:3], "nobody", 'q"\\']
    for table in ("user_topk", "user_vector", "user_affinity"):
        for body in ({"entities": mixed, "k": 7}, {"entities": users}, {"entities": ["nobody"]}):
            fast_responses, slow = ways.send_both_ways(post(body, table), times=2)
            assert fast_responses == slow


def test_what_is_blocked_is_gone_from_the_next_answer(ways: Ways, users: list[str]) -> None:
    """Also where an answer lay ready."""
    get_request = get(users[0], b"k=5")
    first = [json.loads(ways.send(get_request).body) for _ in range(3)][-1]
    blocked_item = first["items"][0].encode()

    ways.runner.run(ways.service.follower.holder.put_own_blocklist_in_force(Blocklist(1, frozenset({blocked_item}))))
    second = json.loads(ways.send(get_request).body)

    assert second["source"] == "l1" and first["items"][0] not in second["items"]
    for request in (get_request, post({"entities": users[:50], "k": 20}), post({"entities": users[:50]})):
        fast_responses, slow = ways.send_both_ways(request)
        assert fast_responses == slow

    erased = Blocklist(2, entities=frozenset({users[0].encode()}))
    ways.runner.run(ways.service.follower.holder.put_own_blocklist_in_force(erased))
    erased_answer = json.loads(ways.send(get_request).body)

    assert (erased_answer["source"], erased_answer["reason"]) == ("default", "entity_blocked")
    fast_responses, slow = ways.send_both_ways(post({"entities": users[:50], "k": 20}))
    assert fast_responses == slow


def test_while_a_canary_runs_every_request_is_routed_and_counted(ways: Ways, users: list[str]) -> None:
    get_request = get(users[0], b"k=5")
    for _ in range(3):
        ways.send(get_request)
    ways.service.metrics.tally.drain()

    ways.service.follower.holder.canary = Canary("20990101T000000Z-0", 50.0, 0.0)
    ways.service.follower.holder.set_experiments_running(are_running=False)
    for request in (get_request, post({"entities": users[:3]})):
        assert ways.send(request).status == 200

    assert ways.service.metrics.tally.drain() == ({}, {})
    count_by_label = ways.scraped("larder_canary_requests_total")
    assert sum(count_by_label.values()) == 2


def test_while_experiments_run_every_request_is_routed_and_an_arm_is_never_passed_over(
    ways: Ways, users: list[str]
) -> None:
    get_request = get(users[0], b"k=5")
    for _ in range(3):
        ways.send(get_request)
    for request in (
        get(users[0], b"arm=e%3Da"),
        get(users[0], b"k=5", headers=[(b"x-larder-arm", b"e=a")]),
        post({"entities": users[:3], "arm": "e=a"}),
        post({"entities": users[:3]}, headers=[(b"x-larder-arm", b"e=a")]),
    ):
        assert ways.send(request).status == 409
    ways.service.metrics.tally.drain()

    ways.service.follower.holder.set_experiments_running(are_running=True)
    for request in (get_request, post({"entities": users[:3]})):
        assert ways.send(request).status == 200

    assert ways.service.metrics.tally.drain() == ({}, {})


def test_answers_of_a_stale_replica_say_so(ways: Ways, users: list[str]) -> None:
    get_request = get(users[0], b"k=5")
    for _ in range(3):
        ways.send(get_request)

    ways.service.follower.note_concern("pointer", "pointer_vanished")

    for request in (get_request, post({"entities": [*users[:5], "nobody"]})):
        fast_responses, slow = ways.send_both_ways(request)
        assert fast_responses == slow and all(
            b'"stale":"pointer_vanished"' in response.body for response in fast_responses
        )


def test_sources_sum_to_entities_and_latencies_to_answers(ways: Ways, users: list[str]) -> None:
    """Over both ways."""
    for is_fast in (True, False, True):
        for request in (get(users[0]), get("nobody"), post({"entities": [*users[:20], "nobody"]})):
            assert ways.send(request, is_fast=is_fast).status == 200
    ways.send(get(users[0], b"k=0"))

    entities = sum(ways.scraped("larder_entities_total").values())
    answers = sum(ways.scraped("larder_answers_total").values())
    seconds = sum(ways.scraped("larder_answer_seconds_count").values())
    statuses = ways.scraped("larder_requests_total")

    assert entities == answers == seconds == 3 * 23
    assert statuses['{route="GET /v1/lookup/{table}",status="200"}'] == 6
    assert statuses['{route="POST /v1/lookup/{table}",status="200"}'] == 3
    assert statuses['{route="GET /v1/lookup/{table}",status="422"}'] == 1
    assert sum(ways.scraped("larder_misses_total").values()) == 6
    assert ways.service.tiers.counters.result_total == 3 * 23


def test_what_was_answered_hot_is_read_ahead_before_a_flip(ways: Ways, users: list[str]) -> None:
    for _ in range(3):
        ways.send(get(users[7]))

    assert list(ways.service.ladder.recent_names.all_names()).count(("user_topk", users[7].encode())) == 3


def test_a_body_that_is_too_long_is_refused_as_before(ways: Ways) -> None:
    limit = ways.service.body_bytes_max
    long = b'{"entities":["' + b"x" * limit + b'"]}'
    declared = ((b"content-length", b"%d" % (limit + 1)),)
    for request in (post(long), post(b"", headers=declared)):
        fast_responses, slow = ways.send_both_ways(request, times=1)
        assert fast_responses == slow and fast_responses[0].status == 413


def test_without_the_token_nothing_is_answered(night: NightConfig, users: list[str]) -> None:
    for ways in running(night, token="sésame"):
        good = ((b"authorization", "Bearer sésame".encode()),)
        for _ in range(3):
            assert ways.send(get(users[0], headers=good)).status == 200
        for headers in ((), ((b"authorization", b"Bearer x"),), ((b"authorization", b"Bearer x"), *good)):
            for request in (get(users[0], headers=headers), post({"entities": users[:2]}, headers=headers)):
                assert ways.send(request).status == 401
        assert ways.send(get(users[0], headers=good)).status == 200


def test_ready_answers_count_in_the_bound_of_memory(night: NightConfig, users: list[str]) -> None:
    bound = 300_000
    for ways in running(night, l1_bytes=bound):
        local = ways.service.tiers.local_tier
        for user in users:
            for _ in range(3):
                ways.send(get(user, b"k=20"))
            assert local.size_bytes <= bound
        assert len(local) < 2 * len(users)


@pytest.mark.parametrize(
    ("at", "raw"),
    [
        (14, b"\x20"),  # another format
        (14, b"\x11"),  # a live record
        (12, b"\x03\x00"),  # three items left
        (12, b"\x00\x00"),  # none
        (12, b"\xff\xff"),  # more than fit
        (16 + 4 * 30, b"\xf0\xff\xff\xff"),  # no such item, beyond k
        (16 + 4 * K, b"\x00\x7e"),  # not a number
        (16 + 4 * K + 60, b"\x00\x7c"),  # infinite, beyond k
        (15, b"\x7f"),  # beyond float32 with its exponent
    ],
)
def test_whatever_a_record_holds_both_ways_make_the_same_of_it(
    ways: Ways, users: list[str], at: int, raw: bytes
) -> None:
    live = ways.service.capture_served().live
    table = live.manifest.tables["user_topk"]
    record_keys = [find_record_key(live, table, user.encode()) for user in users[:4]]
    for request in (get(users[0], b"k=20"), post({"entities": users[:4], "k": 20})):
        response_pairs = []
        for is_fast in (True, False):
            ways.forget()
            ways.send(post({"entities": users[:4]}), is_fast=False)
            key = LocalKey(live.generation, table.name, record_keys[0].hash_or_digest)
            entry = ways.service.tiers.local_tier.get(key)
            assert entry is not None
            record = entry.record[:at] + raw + entry.record[at + len(raw) :]
            ways.service.tiers.local_tier.put(key, entry._replace(record=record))
            response_pairs.append([ways.send(request, is_fast=is_fast) for _ in range(2)])
        assert response_pairs[0] == response_pairs[1]


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"entities":["u-00001",""],"deadline_ms":900}', 422),
        (b'{"entities":["u-00001"],"k":5000,"deadline_ms":900}', 422),
        (b'{"entities":[{"id":"new","history":["i-00001"]}],"deadline_ms":900}', 200),
        (b'{"entities":["deadline_ms"', 422),
    ],
)
def test_a_body_is_parsed_once_whatever_comes_of_it(
    long_lived: Ways, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int, is_behind: bool
) -> None:
    """To tell whether it is late, by the hot route and by the routes behind that: it was parsed two to three times."""
    parsed: list[object] = []
    loads = orjson.loads

    def note_and_load(raw: bytes) -> object:
        parsed.append(raw)
        return loads(raw)

    monkeypatch.setattr(orjson, "loads", note_and_load)
    monkeypatch.setattr(long_lived.service.admission.loop_valve, "interval_wait", 0.1 if is_behind else 0.0)
    response = long_lived.send(post(body))

    assert response.status == status and parsed.count(body) == 1


def to(path: bytes, body: bytes) -> AsgiRequest:
    return replace(post(body), path=path)


SENT_AS_ARROW = ((b"content-type", ARROW_MEDIA_TYPE.encode()),)


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("http_request", [
    post({"entities": ["u-00001"], "deadline_ms": 900}),
    post({"entities": [{"id": "new", "history": ["i-00001"]}], "deadline_ms": 900}),
    post(write_arrow_ids(["u-00001"], {"deadline_ms": "900"}), headers=SENT_AS_ARROW),
    to(b"/v1/lookup", b'{"entities":[{"table":"user_topk","id":"u-00001"}],"deadline_ms":900}'),
    to(b"/v1/score", b'{"id":"u-00001","items":["i-00001"],"deadline_ms":900}'),
], ids=["ids", "history", "arrow", "tables", "score"])  # fmt: skip
def test_a_large_body_is_read_in_no_turn_of_the_loop(
    long_lived: Ways, monkeypatch: pytest.MonkeyPatch, http_request: AsgiRequest, is_fast: bool, is_behind: bool
) -> None:
    threads: list[int] = []

    def noting(read):
        def read_and_note(*arguments):
            threads.append(threading.get_ident())
            return read(*arguments)

        return read_and_note

    for name in "read_json", "read_arrow_lookup":
        monkeypatch.setattr(parsing, name, noting(getattr(parsing, name)))
    for module in parsing, batch_lookup, gate:
        monkeypatch.setattr(module, "LARGE_BODY_BYTES", len(http_request.pieces[0]) - 1)
    monkeypatch.setattr(long_lived.service.admission.loop_valve, "interval_wait", 0.1 if is_behind else 0.0)

    response = long_lived.send(http_request, is_fast=is_fast)

    assert response.status in (200, 422) and len(threads) == 1
    assert threading.get_ident() not in threads


def test_of_a_stranger_no_body_is_waited_for_on_either_way(night: NightConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = b"/v1/lookup/user_topk", b"/v1/lookup", b"/v1/score", b"/v1/explain/user_topk"
    for ways in running(night, token="secret"):
        for wait in 0.0, 0.1:
            monkeypatch.setattr(ways.service.admission.loop_valve, "interval_wait", wait)
            for path in paths:
                bodiless_request = AsgiRequest("POST", path, pieces=())  # whoever waits for it hears of its end
                assert [ways.send(bodiless_request, is_fast=is_fast).status for is_fast in (True, False)] == [401] * 2
