"""Ids that are hard to quote, of users and of items, come back from every way through the service as they are."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest

from infra.demo.synthetic import WorldSettings, synthesize
from precompute.config.settings import NightConfig
from precompute.reference.train import train_reference
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client.calls import write_arrow_ids
from tests import hostile
from tests.integration.http.hot_way import AsgiRequest, Ways, running
from tests.integration.nights import DATA_UNTIL, prepare, publish_night, top_lists, write_clicks

ARROW = ARROW_MEDIA_TYPE.encode()
K = 5
KNOWN_IDS = tuple(hostile_id for hostile_id in hostile.EVERY if hostile_id != "null")
"""Ids that a source may have: `null` is what programs write for nothing."""
STRANGERS = [f"{hostile_id}~" for hostile_id in KNOWN_IDS if len(hostile_id.encode()) < 256]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    """Every user and every item has such an id."""
    folder, count = tmp_path_factory.mktemp("hostile"), len(KNOWN_IDS)
    clicks = synthesize(WorldSettings(user_count=count, item_count=count, seed=0))
    users, items = KNOWN_IDS, KNOWN_IDS[::-1]
    write_clicks(folder, replace(clicks, user_ids=users, item_ids=items))
    config = prepare(folder, redis_url, users=count, items=count)
    train_reference(config, data_until=DATA_UNTIL)
    publish_night(config, DATA_UNTIL)
    return config


@pytest.fixture(scope="module")
def ways(night: NightConfig) -> Iterator[Ways]:
    yield from running(night)


@pytest.fixture(scope="module")
def lists(night: NightConfig, ways: Ways) -> dict[str, dict[str, list[str]]]:
    """The first of each list by table and id, as they lie in the page files."""
    generation = ways.service.capture_served().live.generation
    lists_by_table = {
        table: top_lists(night, generation, list(KNOWN_IDS), table) for table in ("user_topk", "item_similar")
    }
    return {
        table: {id_: list(names[:K]) for id_, names in items_by_id.items()}
        for table, items_by_id in lists_by_table.items()
    }


def get(id_: str, table: str, route: str = "lookup") -> AsgiRequest:
    return AsgiRequest("GET", f"/v1/{route}/{table}/{quote(id_, safe='')}".encode(), b"k=%d" % K)


def post(body: object, path: str, *headers: tuple[bytes, bytes]) -> AsgiRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return AsgiRequest("POST", path.encode(), headers=headers, pieces=(raw,))


def read(response: Any) -> Any:
    assert response.status == 200, response.body
    return json.loads(response.body)


def rows(response: Any) -> list[dict[str, Any]]:
    assert response.status == 200, response.body
    table = pa.ipc.open_stream(response.body).read_all()
    table.validate(full=True)
    answer_rows: list[dict[str, Any]] = table.to_pylist()
    return answer_rows


def lists_by_id(answers: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {answer["id"]: answer["items"] for answer in answers}


@pytest.mark.parametrize("table", ["user_topk", "item_similar"])
@pytest.mark.parametrize("is_fast", [True, False], ids=["hot", "routes"])
def test_single_lookups(ways: Ways, lists: Any, table: str, is_fast: bool) -> None:
    expected = {id_: lists[table][id_] for id_ in list(lists[table])}
    assert len(expected) > 100
    ways.forget()

    for source in ("l2", "l1", "l1"):  # from Redis, from a record, ready
        answers = [read(ways.send(get(id_, table), is_fast=is_fast)) for id_ in expected]
        assert lists_by_id(answers) == expected
        assert {answer["source"] for answer in answers} == {source}


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "tasks"])
def test_single_lookups_of_one_turn(ways: Ways, lists: Any, joins: bool) -> None:
    """One caller's id must not reach into another's answer, nor into what is kept of it."""
    expected = {id_: lists["user_topk"][id_] for id_ in list(lists["user_topk"])}
    requests = [get(id_, "user_topk") for id_ in expected]
    ways.forget()
    ways.joins, joined_before = joins, ways.joined

    for source in ("l2", "l1", "l1"):
        answers = [read(response) for response in ways.ask_at_once(requests)]
        assert lists_by_id(answers) == expected
        assert {answer["source"] for answer in answers} == {source}
    assert (ways.joined > joined_before) == joins


@pytest.mark.parametrize("table", ["user_topk", "item_similar"])
@pytest.mark.parametrize("is_fast", [True, False], ids=["hot", "routes"])
def test_batches(ways: Ways, lists: Any, table: str, is_fast: bool) -> None:
    expected, path = lists[table], f"/v1/lookup/{table}"
    assert len(expected) > 120
    body = {"entities": list(expected), "k": K}
    as_arrow = write_arrow_ids(list(expected), {"k": str(K)})
    content_type_header, accept_header = (b"content-type", ARROW), (b"accept", ARROW)
    ways.forget()

    for _ in range(2):  # from Redis, from L1
        assert lists_by_id(read(ways.send(post(body, path), is_fast=is_fast))["answers"]) == expected
    assert lists_by_id(rows(ways.send(post(body, path, accept_header), is_fast=is_fast))) == expected
    assert (
        lists_by_id(read(ways.send(post(as_arrow, path, content_type_header), is_fast=is_fast))["answers"]) == expected
    )
    assert (
        lists_by_id(rows(ways.send(post(as_arrow, path, content_type_header, accept_header), is_fast=is_fast)))
        == expected
    )


@pytest.mark.parametrize("table", ["user_vector", "user_affinity"])
def test_batches_of_numbers(ways: Ways, lists: Any, table: str) -> None:
    ids, path = list(lists["user_topk"]), f"/v1/lookup/{table}"
    field = "vector" if table == "user_vector" else "values"

    answers = read(ways.send(post({"entities": ids}, path)))["answers"]
    behind = read(ways.send(post({"entities": ids}, path), is_fast=False))["answers"]
    table_rows = rows(ways.send(post({"entities": ids}, path, (b"accept", ARROW))))

    assert [answer["id"] for answer in answers] == ids
    numbers = [answer[field] for answer in answers]
    assert numbers == [answer[field] for answer in behind]
    # JSON has the shortest decimal that gives the same float32.
    assert [len(row[field]) for row in table_rows] == [len(row) for row in numbers]
    assert [row["id"] for row in table_rows] == ids


@pytest.mark.parametrize("is_fast", [True, False], ids=["hot", "routes"])
def test_ids_that_the_night_does_not_know(ways: Ways, lists: Any, is_fast: bool) -> None:
    """Live from a history of such items, and defaults without one; in every form."""
    items, path = list(lists["item_similar"]), "/v1/lookup/user_topk"
    entities: list[Any] = [
        {"id": id_, "history": [items[at], items[-1 - at]]} for at, id_ in enumerate(STRANGERS[:40])
    ]  # fmt: skip
    entities += STRANGERS[40:]
    body = {"entities": entities, "k": K, "deadline_ms": 9_000, "exclude": items[:2]}

    answers = read(ways.send(post(body, path), is_fast=is_fast))["answers"]
    in_arrow = rows(ways.send(post(body, path, (b"accept", ARROW)), is_fast=is_fast))
    alone = [read(ways.send(get(id_, "user_topk"), is_fast=is_fast)) for id_ in STRANGERS[40:]]

    assert [answer["id"] for answer in answers] == STRANGERS == [answer["id"] for answer in in_arrow]
    assert {answer["source"] for answer in answers[:40]} <= {"live", "l1"}  # computed once
    assert {answer["source"] for answer in answers[40:]} == {"default"}
    assert [answer["items"] for answer in in_arrow] == [answer["items"] for answer in answers]
    known_items = set(items)
    for answer, of in zip(answers[:40], entities, strict=False):
        assert answer["items"] and set(answer["items"]) <= known_items - set(of["history"]) - set(items[:2])
    assert [answer["id"] for answer in alone] == STRANGERS[40:]
    assert all(set(answer["items"]) <= known_items and answer["items"] for answer in alone)


def test_several_tables_in_one_batch(ways: Ways, lists: Any) -> None:
    table_id_pairs = [(table, id_) for table in lists for id_ in lists[table]]
    entities = [{"table": table, "id": id_} for table, id_ in table_id_pairs]

    answers = read(ways.send(post({"entities": entities, "k": K}, "/v1/lookup")))["answers"]

    assert [(answer["table"], answer["id"]) for answer in answers] == table_id_pairs
    assert [answer["items"] for answer in answers] == [lists[table][id_] for table, id_ in table_id_pairs]


def test_candidates_are_put_in_order_and_named(ways: Ways, lists: Any) -> None:
    items, users = list(lists["item_similar"]), list(lists["user_topk"])
    for user in users[::20]:
        body = {"user": {"id": user, "history": items[:3]}, "items": [*items, *STRANGERS[:30]]}

        answer = read(ways.send(post(body, "/v1/score")))

        assert answer["id"] == user
        assert sorted(answer["items"]) == sorted(items[3:])
        assert answer["excluded"] == items[:3] and answer["unknown"] == STRANGERS[:30]


def test_explanations(ways: Ways, lists: Any) -> None:
    expected = lists["user_topk"]
    for id_ in list(expected)[::4]:
        explanation = read(ways.send(get(id_, "user_topk", "explain")))
        body = {"entities": [id_], "k": K}
        by_body = read(ways.send(post(body, "/v1/explain/user_topk")))

        assert explanation["id"] == by_body["id"] == id_
        assert explanation["record"]["items"] == by_body["record"]["items"] == expected[id_]
    for id_ in STRANGERS[::10]:
        assert read(ways.send(get(id_, "user_topk", "explain")))["id"] == id_
