"""Ids that are hard to quote, of users and of items, come back from every way through the service as they are."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest

from infra.demo.synthetic import World, synthesize
from precompute.config.settings import NightConfig
from precompute.operations.train import train_reference
from serving.arrow_ipc.schema import MEDIA_TYPE
from serving.client.arrow import write_arrow_ids
from tests import hostile
from tests.integration.http.hot_way import Asked, Ways, running
from tests.integration.nights import UNTIL, prepare, publish_night, top_lists, write_clicks

ARROW = MEDIA_TYPE.encode()
K = 5
KNOWN = tuple(each for each in hostile.EVERY if each != "null")
"""Ids that a source may have: `null` is what programs write for nothing."""
STRANGERS = [f"{each}~" for each in KNOWN if len(each.encode()) < 256]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    """Every user and every item has such an id."""
    folder, count = tmp_path_factory.mktemp("hostile"), len(KNOWN)
    clicks = synthesize(World(users=count, items=count, seed=0))
    users, items = KNOWN, KNOWN[::-1]
    write_clicks(folder, replace(clicks, user_ids=users, item_ids=items))
    config = prepare(folder, redis_url, users=count, items=count)
    train_reference(config, data_until=UNTIL)
    publish_night(config, UNTIL)
    return config


@pytest.fixture(scope="module")
def ways(night: NightConfig) -> Iterator[Ways]:
    yield from running(night)


@pytest.fixture(scope="module")
def lists(night: NightConfig, ways: Ways) -> dict[str, dict[str, list[str]]]:
    """The first of each list by table and id, as they lie in the page files."""
    generation = ways.service.holding().live.generation
    found = {
        table: top_lists(night, generation, list(KNOWN), table)
        for table in ("user_topk", "item_similar")
    }
    return {
        table: {id_: list(names[:K]) for id_, names in each.items()}
        for table, each in found.items()
    }


def get(id_: str, table: str, route: str = "lookup") -> Asked:
    return Asked("GET", f"/v1/{route}/{table}/{quote(id_, safe='')}".encode(), b"k=%d" % K)


def post(body: object, path: str, *headers: tuple[bytes, bytes]) -> Asked:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Asked("POST", path.encode(), headers=headers, pieces=(raw,))


def read(sent: Any) -> Any:
    assert sent.status == 200, sent.body
    return json.loads(sent.body)


def rows(sent: Any) -> list[dict[str, Any]]:
    assert sent.status == 200, sent.body
    table = pa.ipc.open_stream(sent.body).read_all()
    table.validate(full=True)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def told(answers: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {each["id"]: each["items"] for each in answers}


@pytest.mark.parametrize("table", ["user_topk", "item_similar"])
@pytest.mark.parametrize("hot", [True, False], ids=["hot", "routes"])
def test_single_lookups(ways: Ways, lists: Any, table: str, hot: bool) -> None:
    expected = {each: lists[table][each] for each in list(lists[table])}
    assert len(expected) > 100
    ways.forget()

    for source in ("l2", "l1", "l1"):  # from Redis, from a record, ready
        answers = [read(ways.ask(get(each, table), hot=hot)) for each in expected]
        assert told(answers) == expected
        assert {each["source"] for each in answers} == {source}


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "tasks"])
def test_single_lookups_of_one_turn(ways: Ways, lists: Any, joins: bool) -> None:
    """One caller's id must not reach into another's answer, nor into what is kept of it."""
    expected = {each: lists["user_topk"][each] for each in list(lists["user_topk"])}
    asked = [get(each, "user_topk") for each in expected]
    ways.forget()
    ways.joins, before = joins, ways.joined

    for source in ("l2", "l1", "l1"):
        answers = [read(each) for each in ways.ask_at_once(asked)]
        assert told(answers) == expected
        assert {each["source"] for each in answers} == {source}
    assert (ways.joined > before) == joins


@pytest.mark.parametrize("table", ["user_topk", "item_similar"])
@pytest.mark.parametrize("hot", [True, False], ids=["hot", "routes"])
def test_batches(ways: Ways, lists: Any, table: str, hot: bool) -> None:
    expected, path = lists[table], f"/v1/lookup/{table}"
    assert len(expected) > 120
    body = {"entities": list(expected), "k": K}
    as_arrow = write_arrow_ids(list(expected), {"k": str(K)})
    sent, wanted = (b"content-type", ARROW), (b"accept", ARROW)
    ways.forget()

    for _ in range(2):  # from Redis, from L1
        assert told(read(ways.ask(post(body, path), hot=hot))["answers"]) == expected
    assert told(rows(ways.ask(post(body, path, wanted), hot=hot))) == expected
    assert told(read(ways.ask(post(as_arrow, path, sent), hot=hot))["answers"]) == expected
    assert told(rows(ways.ask(post(as_arrow, path, sent, wanted), hot=hot))) == expected


@pytest.mark.parametrize("table", ["user_vector", "user_affinity"])
def test_batches_of_numbers(ways: Ways, lists: Any, table: str) -> None:
    ids, path = list(lists["user_topk"]), f"/v1/lookup/{table}"
    field = "vector" if table == "user_vector" else "values"

    answers = read(ways.ask(post({"entities": ids}, path)))["answers"]
    behind = read(ways.ask(post({"entities": ids}, path), hot=False))["answers"]
    table_rows = rows(ways.ask(post({"entities": ids}, path, (b"accept", ARROW))))

    assert [each["id"] for each in answers] == ids
    numbers = [each[field] for each in answers]
    assert numbers == [each[field] for each in behind]
    # JSON has the shortest decimal of a float32.
    assert [len(each[field]) for each in table_rows] == [len(each) for each in numbers]
    assert [each["id"] for each in table_rows] == ids


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "routes"])
def test_ids_that_the_night_does_not_know(ways: Ways, lists: Any, hot: bool) -> None:
    """Live from a history of such items, and defaults without one; in every form."""
    items, path = list(lists["item_similar"]), "/v1/lookup/user_topk"
    asked: list[Any] = [
        {"id": each, "history": [items[at], items[-1 - at]]} for at, each in enumerate(STRANGERS[:40])
    ]  # fmt: skip
    asked += STRANGERS[40:]
    body = {"entities": asked, "k": K, "deadline_ms": 9_000, "exclude": items[:2]}

    answers = read(ways.ask(post(body, path), hot=hot))["answers"]
    in_arrow = rows(ways.ask(post(body, path, (b"accept", ARROW)), hot=hot))
    alone = [read(ways.ask(get(each, "user_topk"), hot=hot)) for each in STRANGERS[40:]]

    assert [each["id"] for each in answers] == STRANGERS == [each["id"] for each in in_arrow]
    assert {each["source"] for each in answers[:40]} <= {"live", "l1"}  # computed once
    assert {each["source"] for each in answers[40:]} == {"default"}
    assert [each["items"] for each in in_arrow] == [each["items"] for each in answers]
    known = set(items)
    for each, of in zip(answers[:40], asked, strict=False):
        assert each["items"] and set(each["items"]) <= known - set(of["history"]) - set(items[:2])
    assert [each["id"] for each in alone] == STRANGERS[40:]
    assert all(set(each["items"]) <= known and each["items"] for each in alone)


def test_tables_beside_each_other(ways: Ways, lists: Any) -> None:
    both = [(table, id_) for table in lists for id_ in lists[table]]
    asked = [{"table": table, "id": id_} for table, id_ in both]

    answers = read(ways.ask(post({"entities": asked, "k": K}, "/v1/lookup")))["answers"]

    assert [(each["table"], each["id"]) for each in answers] == both
    assert [each["items"] for each in answers] == [lists[table][id_] for table, id_ in both]


def test_candidates_are_put_in_order_and_named(ways: Ways, lists: Any) -> None:
    items, users = list(lists["item_similar"]), list(lists["user_topk"])
    for user in users[::20]:
        body = {"user": {"id": user, "history": items[:3]}, "items": [*items, *STRANGERS[:30]]}

        answer = read(ways.ask(post(body, "/v1/score")))

        assert answer["id"] == user
        assert sorted(answer["items"]) == sorted(items[3:])
        assert answer["excluded"] == items[:3] and answer["unknown"] == STRANGERS[:30]


def test_explanations(ways: Ways, lists: Any) -> None:
    expected = lists["user_topk"]
    for each in list(expected)[::4]:
        found = read(ways.ask(get(each, "user_topk", "explain")))
        body = {"entities": [each], "k": K}
        by_body = read(ways.ask(post(body, "/v1/explain/user_topk")))

        assert found["id"] == by_body["id"] == each
        assert found["record"]["items"] == by_body["record"]["items"] == expected[each]
    for each in STRANGERS[::10]:
        assert read(ways.ask(get(each, "user_topk", "explain")))["id"] == each
