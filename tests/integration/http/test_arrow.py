"""The binary form of a batch says what the JSON form says, entity by entity, on both ways through the service."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import redis

from cache.store.blocklist import Blocklist
from precompute.config.settings import NightConfig
from serving.app import create_app
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client import AsyncClient, Entity, InvalidRequest, Options, Policy
from serving.client.calls import write_arrow_ids
from serving.requests.answers import Answer
from tests.integration.http.hot_way import AsgiRequest, AsgiResponse, Ways
from tests.integration.nights import K, build_night, histories, publish_night
from tests.integration.serving_app import BASE, eventually, serving, settings

ARROW = ARROW_MEDIA_TYPE.encode()
ACCEPT = ((b"accept", ARROW),)
NEXT_DAY = "2026-02-02T00:00:00Z"
UNKNOWN_IDS = ["no-such", "用户 157", "a/b", 'q"\\', "0000007"]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    config = build_night(tmp_path_factory.mktemp("arrow"), redis_url)
    publish_night(config, NEXT_DAY)
    return config


@pytest.fixture(scope="module")
def users(night: NightConfig) -> list[str]:
    return sorted(histories(night))[:40]


@pytest.fixture
def ways(night: NightConfig) -> Iterator[Ways]:
    app = create_app(settings(night, poll_s=60.0, blocklist_poll_s=60.0, l2_deadline_ms=2_500.0))
    with asyncio.Runner() as runner:
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        try:
            ways = Ways(app, runner)

            async def has_previous() -> bool:
                return ways.service.capture_served().previous is not None

            assert runner.run(eventually(has_previous))
            yield ways
        finally:
            runner.run(life.__aexit__(None, None, None))


def post(body: object, table: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> AsgiRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return AsgiRequest("POST", f"/v1/lookup/{table}".encode(), headers=headers, pieces=(raw,))


def rows_of(response: AsgiResponse) -> list[dict[str, Any]]:
    """As the JSON form has them: what is null there is null here, what is absent there is null here."""
    assert response.status == 200, response.body
    assert dict(response.headers)[b"content-type"] == ARROW
    table = pa.ipc.open_stream(response.body).read_all()
    table.validate(full=True)
    name = table.schema.metadata[b"table"].decode()
    always = {"id", "producer", "vector", "values"}
    return [
        {"table": name} | {key: value for key, value in row.items() if value is not None or key in always}
        for row in table.to_pylist()
    ]


def json_of(response: AsgiResponse) -> list[dict[str, Any]]:
    """Numbers as the float32 that they stand for."""
    assert response.status == 200, response.body
    answers: list[dict[str, Any]] = orjson.loads(response.body)["answers"]
    for answer in answers:
        for name in ("scores", "vector", "values"):
            if answer.get(name) is not None:
                answer[name] = np.array(answer[name], np.float32).tolist()
    return answers


def same_both_ways(ways: Ways, body: dict[str, Any], table: str) -> list[dict[str, Any]]:
    """From Redis, then from L1; the answers."""
    response_pairs = []
    for is_fast in (True, False):
        for headers in ((), ACCEPT):
            ways.forget()
            request = post(body, table, headers)
            response_pairs.append([ways.send(request, is_fast=is_fast) for _ in range(2)])
    hot_json, hot_arrow, slow_json, slow_arrow = response_pairs
    for fast_response, slow_response in zip(hot_json, slow_json, strict=True):
        assert json_of(fast_response) == json_of(slow_response)
        assert fast_response.body == slow_response.body
    for fast_response, slow_response, text in zip(hot_arrow, slow_arrow, hot_json, strict=True):
        assert rows_of(fast_response) == rows_of(slow_response) == json_of(text)
    return json_of(hot_json[0])


@pytest.mark.parametrize("table", ["user_topk", "user_vector", "item_vector", "item_similar", "user_affinity"])
@pytest.mark.parametrize("k", [None, 1, 20])
def test_every_table_says_the_same_in_both_forms(ways: Ways, users: list[str], table: str, k: int | None) -> None:
    items = [f"i-{number:05d}" for number in range(20)]
    ids = [*users[:20], UNKNOWN_IDS[0], *items, *UNKNOWN_IDS[1:], users[0]]
    body: dict[str, Any] = {"entities": ids}
    if k is not None:
        body["k"] = k

    answers = same_both_ways(ways, body, table)

    assert [answer["id"] for answer in answers] == ids
    assert {answer["source"] for answer in answers} >= {"l2", "default"}


def test_known_ids_alone_take_the_hot_way_and_are_counted(ways: Ways, users: list[str]) -> None:
    ways.forget()
    reads_before = ways.service.tiers.counters.l1_total, ways.service.tiers.counters.l2_records

    first, second = (ways.send(post({"entities": users, "k": 5}, "user_topk", ACCEPT)) for _ in "ab")

    assert {row["source"] for row in rows_of(first)} == {"l2"}
    assert {row["source"] for row in rows_of(second)} == {"l1"}
    after = ways.service.tiers.counters.l1_total, ways.service.tiers.counters.l2_records
    assert (after[0] - reads_before[0], after[1] - reads_before[1]) == (len(users), len(users))
    assert ways.service.metrics.tally.request_count_by_route["POST /v1/lookup/{table}"] == 2


@pytest.mark.parametrize("ids", [["no-such"], ["no-such", "nobody", "no-such"]])
def test_a_batch_of_unknown_ids_takes_the_hot_way_too(
    ways: Ways, ids: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ways.forget()
    requests_before = ways.service.metrics.tally.request_count_by_route["POST /v1/lookup/{table}"]

    rows = rows_of(ways.send(post({"entities": ids, "k": 5}, "user_topk", ACCEPT)))

    assert [row["source"] for row in rows] == ["default"] * len(ids)
    assert ways.service.metrics.tally.request_count_by_route["POST /v1/lookup/{table}"] == requests_before + 1
    assert not caplog.records


def test_a_long_batch_is_whole_and_in_order(ways: Ways, night: NightConfig) -> None:
    ids = [*sorted(histories(night)), "no-such"]
    assert len(ids) > 300

    answers = same_both_ways(ways, {"entities": ids, "k": 3}, "user_topk")

    assert [answer["id"] for answer in answers] == ids


def test_inputs_and_options_say_the_same(ways: Ways, users: list[str]) -> None:
    generation = ways.service.capture_served().live.generation
    previous = ways.service.capture_served().previous
    assert previous is not None
    entities = [
        users[0],
        {"id": "stranger", "history": ["i-00001", "i-00002", "gone"]},
        {"history": ["i-00003"]},
        {"id": users[1], "history": ["i-00001"]},
        "no-such",
    ]
    sources: set[str] = set()
    for more in (
        {},
        {"k": 3, "exclude": ["i-00004"]},
        {"fresh": True, "deadline_ms": 3_000},
        {"generation": generation},
        {"generation": previous.generation},
        {"max_age_seconds": 1.0},
    ):
        text, arrow = (post({"entities": entities, **more}, "user_topk", headers) for headers in ((), ACCEPT))
        ways.send(text)  # from now on what was computed is in L1
        answers = json_of(ways.send(text))
        assert rows_of(ways.send(arrow)) == answers and len(answers) == len(entities)
        sources |= {answer["source"] for answer in answers}
    assert sources == {"l1", "live", "default"}


@pytest.mark.parametrize("table", ["user_topk", "user_vector", "user_affinity"])
def test_where_pages_of_the_night_are_gone_the_previous_one_answers_in_both_forms(
    ways: Ways, night: NightConfig, users: list[str], table: str
) -> None:
    served = ways.service.capture_served()
    assert served.previous is not None
    client = redis.Redis.from_url(night.redis_url or "", protocol=2)
    prefix = f"larder:1:{night.namespace}:g:{served.live.generation}:{table}:"
    page_by_key = {f"{prefix}{page}": client.get(f"{prefix}{page}") for page in range(0, 8, 2)}
    pages = {name: page for name, page in page_by_key.items() if page is not None}
    assert pages
    client.delete(*pages)
    try:
        answers = same_both_ways(ways, {"entities": [*users, "no-such"], "k": 4}, table)
    finally:
        for name, page in pages.items():
            client.set(name, page)
    assert "previous" in {answer["source"] for answer in answers}
    generations = {answer["generation"] for answer in answers if answer["source"] == "previous"}
    assert generations == {served.previous.generation}


def test_blocked_items_and_entities_are_left_out_of_both_forms(ways: Ways, users: list[str]) -> None:
    first = same_both_ways(ways, {"entities": users, "k": 5}, "user_topk")
    blocked_items = frozenset({first[0]["items"][0].encode()})
    blocklist = Blocklist(1, blocked_items, frozenset({users[1].encode()}))
    ways.runner.run(ways.service.follower.holder.put_own_blocklist_in_force(blocklist))

    answers = same_both_ways(ways, {"entities": users, "k": 5}, "user_topk")

    assert first[0]["items"][0] not in {item for answer in answers for item in answer["items"]}
    assert answers[1]["reason"] == "entity_blocked"


@pytest.mark.parametrize("options", [{}, {"k": "3"}, {"k": "3", "deadline_ms": "900.5"}])
def test_a_question_in_arrow_is_the_same_question(ways: Ways, users: list[str], options: dict[str, str]) -> None:
    ids = [*users, *UNKNOWN_IDS]
    raw = write_arrow_ids(ids, options)
    text = {"entities": ids} | {name: json.loads(value) for name, value in options.items()}
    sent_as = (b"content-type", ARROW)

    for is_fast in (True, False):
        ways.forget()
        json_response = ways.send(post(text, "user_topk"), is_fast=is_fast)
        ways.forget()
        response_to_arrow = ways.send(post(raw, "user_topk", (sent_as,)), is_fast=is_fast)
        ways.forget()
        arrow_response = ways.send(post(raw, "user_topk", (sent_as, *ACCEPT)), is_fast=is_fast)

        assert response_to_arrow == json_response
        assert rows_of(arrow_response) == json_of(json_response)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{}", ((b"accept", b"text/html"),), 406, "not_acceptable"),
        (b"{}", ((b"content-type", b"text/csv"),), 415, "unsupported_media_type"),
        (b"{}", ((b"content-type", ARROW),), 422, "invalid_arrow"),
        (b'{"entities":["u"]}', ((b"accept", ARROW), (b"x-deadline-ms", b"x")), 422, None),
        (b"x" * 9_000_000, ((b"content-type", ARROW),), 413, "body_too_large"),
    ],
)
def test_refusals_are_problems_in_json_on_both_ways(
    ways: Ways, body: bytes, headers: tuple[tuple[bytes, bytes], ...], status: int, code: str | None
) -> None:
    fast_responses, slow = ways.send_both_ways(post(body, "user_topk", headers), 1)

    assert fast_responses == slow
    assert fast_responses[0].status == status
    assert dict(fast_responses[0].headers)[b"content-type"] == b"application/json"
    error = orjson.loads(fast_responses[0].body)["error"]
    assert code is None or error["code"] == code


def fields_of(answer: Answer) -> dict[str, Any]:
    value_by_field = {name: getattr(answer, name) for name in Answer.__dataclass_fields__}
    value_by_field.pop("age_seconds")
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in value_by_field.items()}


@pytest.mark.parametrize("table", ["user_topk", "user_vector", "user_affinity"])
async def test_the_client_gives_the_same_answers_in_binary(night: NightConfig, users: list[str], table: str) -> None:
    questions: list[tuple[list[Any], Options]] = [
        ([*users, *UNKNOWN_IDS, 7], Options()),
        ([*users, *UNKNOWN_IDS], Options(k=3, deadline_ms=5_000, fresh=False)),
        ([users[0], Entity("new", history=["i-00001"]), Entity(history=["i-00002"])], Options(k=2)),
        (users, Options(exclude=["i-00003"])),
    ]
    async with serving(night) as app:
        answers_by_binary = {}
        for binary in (False, True):
            client = AsyncClient(BASE, transport=app.http._transport, binary=binary, policy=Policy(deadline_ms=9_000))
            async with client as larder:
                for entities, _ in questions:
                    await larder.lookup_many(table, entities)  # from now on all from L1
                answers_by_binary[binary] = [await larder.lookup_many(table, *question) for question in questions]
                with pytest.raises(InvalidRequest, match="k is"):
                    await larder.lookup_many("user_topk", users, Options(k=K + 1))
        for text, arrow in zip(answers_by_binary[False], answers_by_binary[True], strict=True):
            assert list(map(fields_of, arrow)) == list(map(fields_of, text))
            for answer in arrow:
                for numbers in (answer.scores, answer.vector, answer.values):
                    assert numbers is None or (numbers.dtype == np.float32 and not numbers.flags.writeable)


def test_openapi_names_both_forms(ways: Ways) -> None:
    route = orjson.loads(ways.send(AsgiRequest("GET", b"/openapi.json")).body)["paths"]["/v1/lookup/{table}"]["post"]

    assert route["requestBody"]["content"].keys() == {"application/json"}
    assert route["responses"]["200"]["content"].keys() == {"application/json"}
    arrow = route["x-larder-arrow"]
    assert {arrow[direction]["mediaType"] for direction in ("requestBody", "response")} == {ARROW_MEDIA_TYPE}
    assert {"406", "415"} <= route["responses"].keys()
