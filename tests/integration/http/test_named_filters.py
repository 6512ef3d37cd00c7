"""Named filters over HTTP: a name is answered as the expression that the answering generation declares by it."""

import io
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
import pytest
from rich.console import Console

from cache.errors import Refused
from cache.filters.expression import read_filter
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.bulk.load import total_bytes
from precompute.cli.status import read_state, report_status
from precompute.config.settings import FilterConfig
from precompute.filters import item_attributes
from precompute.filters.item_attributes import allowed_items
from precompute.planning.command import _forecast_tables
from precompute.planning.forecast import forecast
from precompute.planning.options import PlanParameters
from serving.cli import lookup
from serving.client import AsyncClient, InvalidRequest, Options
from serving.engine.entity import PendingAnswer
from serving.explain import cli as explain_cli
from serving.filters.filtered_lookup import FilteredLookup
from tests.integration.http.hot_way import AsgiRequest, running
from tests.integration.http.shop import BRANDS, Shop, make_shop, wanted_of
from tests.integration.nights import DATA_UNTIL, NEXT, publish_night, top_lists
from tests.integration.program import environment, started
from tests.integration.serving_app import BASE, Running, eventually, serving
from tests.unit.cache.filters.columns import passes

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
DECLARED: dict[str, Any] = {
    "in_stock": {"==": ["stock", True]},
    "cheap-sale.1": {"and": [{"<": ["price", 40]}, {"contains": ["tags", "sale"]}]},
    "hardly": {"and": [{"==": ["brand", BRANDS[0]]}, {"<": ["price", 12.5]}, {"==": ["stock", True]}]},
    "nothing": {"==": ["brand", "no-such-brand"]},
}  # fmt: skip
LISTS = ("user_topk", "item_similar")
TABLES = {"in_stock": LISTS, "hardly": LISTS, "nothing": ("user_topk",)}
COMPARED_FIELDS = ("items", "scores", "short", "source", "reason", "generation")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    declared = {name: FilterConfig(expression, TABLES.get(name, ())) for name, expression in DECLARED.items()}
    return make_shop(tmp_path_factory.mktemp("named"), redis_url, filters=declared)


async def get_answer_pairs(
    running: Running, table: str, entities: list[Any], name: str, **more: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Answers to each entity under a declared filter, and under its expression sent along, without their ages."""
    answers = []
    for filter_ in (name, DECLARED[name]):
        body = {"entities": entities, "filter": filter_, **more}
        answers.append((await running.post(f"/v1/lookup/{table}", body))["answers"])
    named, expression_answers = (
        [{field: answer.get(field) for field in COMPARED_FIELDS} for answer in answer_list] for answer_list in answers
    )
    return list(zip(named, expression_answers, strict=True))


@pytest.mark.parametrize("name", DECLARED)
async def test_a_name_means_its_expression(shop: Shop, name: str) -> None:
    rng = random.Random(SEED)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        for k in (1, 10, 50):
            excluded_ids = rng.sample(shop.ids, 30)
            known_entities = [{"id": user} for user in sorted(shop.users)]
            unknown_entities = [{"id": "nobody"}, {"id": "new", "history": rng.sample(shop.ids, 5)}]
            pairs = await get_answer_pairs(
                running, "user_topk", [*known_entities, *unknown_entities], name, k=k, exclude=excluded_ids
            )
            pairs += await get_answer_pairs(running, "item_similar", shop.ids[:40], name, k=min(k, 20))
            for named, expression_answer in pairs:
                assert named["items"] == expression_answer["items"], f"seed {SEED}: {name} {k}"
                assert named["short"] == expression_answer["short"], f"seed {SEED}: {name} {k}"


async def test_what_was_made_under_a_filter_is_read_and_not_searched(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_self: object, _served: object, cases: list[PendingAnswer], _context: object) -> list[None]:
        return [None] * len(cases)

    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        users, items, k = sorted(shop.users), shop.ids, 20
        expected_lists = {
            name: [
                expression_answer["items"]
                for table, ids in (("user_topk", users), ("item_similar", items))
                for _, expression_answer in await get_answer_pairs(running, table, ids, name, k=k)
            ]
            for name in ("in_stock", "hardly")
        }
        # When no vector is available
        monkeypatch.setattr(FilteredLookup, "_vectors_of", none)
        answers_by_name = {
            name: [
                named
                for table, ids in (("user_topk", users), ("item_similar", items))
                for named, _ in await get_answer_pairs(running, table, ids, name, k=k)
            ]
            for name in expected_lists
        }
        unmade = await get_answer_pairs(running, "user_topk", users, "cheap-sale.1", k=k)

    # Then lists that the night made are still complete; the others have the items of the stored list that pass
    assert {name: [answer["items"] for answer in lists] for name, lists in answers_by_name.items()} == expected_lists
    assert {answer["source"] for lists in answers_by_name.values() for answer in lists} <= {"l1", "l2"}
    assert {answer["reason"] for lists in answers_by_name.values() for answer in lists} == {None}
    assert any(answer["short"] for answer in answers_by_name["hardly"])
    assert any(named["reason"] == "filtered" for named, _ in unmade)


async def test_its_order_and_scores_are_those_of_a_look_at_all_items(shop: Shop) -> None:
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        for name in ("in_stock", "hardly"):
            body = {"entities": sorted(shop.users), "filter": name}
            for answer in (await running.post("/v1/lookup/user_topk", body))["answers"]:
                user = answer["id"]
                items, scores = wanted_of(
                    shop, shop.users[user], shop.seen_ordinals[user], DECLARED[name], 50, shop.metric
                )
                assert answer["items"] == items
                np.testing.assert_array_equal(np.array(answer["scores"], np.float32), scores)
                assert answer["table"] == "user_topk"


async def test_another_order_has_the_candidates_of_the_expression(shop: Shop) -> None:
    rerank = {"diversify": {"attribute": "brand", "most": 1}}
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        pairs = await get_answer_pairs(running, "user_topk", sorted(shop.users), "in_stock", k=5, rerank=rerank)

    assert all(named["items"] == expression_answer["items"] for named, expression_answer in pairs)


async def test_a_list_that_exclude_uses_up_is_searched_for(shop: Shop) -> None:
    user = min(shop.users)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        body = {"entities": [user], "filter": "in_stock"}
        (full_answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
        excluded_ids = full_answer["items"][5:]
        ((named, expression_answer),) = await get_answer_pairs(
            running, "user_topk", [user], "in_stock", exclude=excluded_ids
        )

    assert named["items"] == expression_answer["items"] and len(named["items"]) == 50
    assert not set(named["items"]) & set(excluded_ids)


async def test_a_table_made_under_a_filter_is_asked_by_the_filter_alone(shop: Shop) -> None:
    user = min(shop.users)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        table_response = await running.http.get(f"/v1/lookup/user_topk.in_stock/{user}")
        table_explanation = await running.get(f"/v1/explain/user_topk/{user}", filter="hardly")
        search_explanation = await running.get(f"/v1/explain/user_topk/{user}", filter="cheap-sale.1")

    assert table_response.status_code == 404 and table_response.json()["error"]["code"] == "unknown_table"
    assert (table_explanation["filter"]["table"], table_explanation["filter"]["from"]) == ("user_topk.hardly", "list")
    assert table_explanation["filter"]["items_of_list"] == table_explanation["record"]["items"]
    assert table_explanation["page"]["state"] == search_explanation["page"]["state"] == "ok"
    assert (search_explanation["filter"]["table"], search_explanation["filter"]["from"]) == ("user_topk", "vectors")


def test_lists_of_what_does_not_pass_are_never_published(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(build: Build) -> dict[str, Any]:
        return {name: np.ones_like(allowed_mask) for name, allowed_mask in allowed_items(build).items()}

    monkeypatch.setattr(item_attributes, "allowed_items", spoilt)
    with pytest.raises(Refused, match=r"sampled records of user_topk\.in_stock"):
        make_shop(tmp_path, redis_url, filters={"in_stock": FilterConfig(DECLARED["in_stock"], ("user_topk",))})


def test_status_tells_what_it_takes(shop: Shop) -> None:
    (generation_report,) = report_status(shop.night, read_state(shop.night))["generations"]
    manifest = read_manifest(shop.night.store(), generation_report["generation"])

    assert set(manifest.stored_tables) - set(manifest.tables) == {
        f"{table}.{name}" for name, tables in TABLES.items() for table in tables
    }
    assert generation_report["tables"]["user_topk.hardly"] == generation_report["tables"]["user_topk"]


async def test_a_name_goes_along_in_all_ways(shop: Shop) -> None:
    user, name = min(shop.users), "cheap-sale.1"
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        ((expected_answer, _),) = await get_answer_pairs(running, "user_topk", [user], name, k=7)
        in_url = await running.get(f"/v1/lookup/user_topk/{user}", filter=name, k=7)
        item_lists = [in_url["items"]]
        for is_binary in (False, True):
            transport = running.http._transport
            async with AsyncClient(BASE, transport=transport, binary=is_binary) as client:
                (answer,) = await client.lookup_many("user_topk", [user], Options(k=7, filter=name))
                item_lists.append(list(answer.items or ()))
        scored = await running.post("/v1/score", {"user": user, "items": shop.ids, "filter": name})
        explanation = await running.get(f"/v1/explain/user_topk/{user}", filter=name, k=7)

    assert item_lists == [expected_answer["items"]] * 3
    passing_ids = [
        id_ for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)
        if item_attributes.get("price", 99) < 40 and "sale" in item_attributes.get("tags", ())
    ]  # fmt: skip
    assert set(scored["items"]) <= set(passing_ids)
    assert set(scored["filtered"]) == set(shop.ids) - set(passing_ids)
    assert explanation["filter"]["passing"] == len(passing_ids)


async def test_an_unknown_name_is_refused_with_those_there_are(shop: Shop) -> None:
    async with serving(shop.night) as running:
        responses = [
            await running.http.post("/v1/lookup/user_topk", json={"entities": ["u"], "filter": "gone"}),
            await running.http.get("/v1/lookup/user_topk/u", params={"filter": "gone"}),
            await running.http.get("/v1/explain/user_topk/u", params={"filter": "gone"}),
            await running.http.post("/v1/score", json={"user": "u", "items": ["i"], "filter": "gone"}),
        ]  # fmt: skip
        async with AsyncClient(BASE, transport=running.http._transport) as client:
            with pytest.raises(InvalidRequest, match="no filter 'gone'"):
                await client.lookup("user_topk", "u", Options(filter="gone"))

    for response in responses:
        error = response.json()["error"]
        assert response.status_code == 422
        assert (error["code"], error["field"]) == ("unknown_filter", "filter")
        assert error["declared"] == sorted(DECLARED)


async def test_every_generation_has_filters_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> None:
    # Given a night whose filter means one brand, and the next night, whose filter means another
    shop = make_shop(
        tmp_path_factory.mktemp("two"),
        redis_url,
        filters={
            "brand": FilterConfig({"==": ["brand", BRANDS[0]]}, ("user_topk",)),
            "old": FilterConfig({"exists": "brand"}),
        },
    )
    later = replace(shop.night, filters={"brand": FilterConfig({"==": ["brand", BRANDS[1]]}, ("user_topk",))})
    live = publish_night(later, NEXT)
    brands = {id_: item_attributes.get("brand") for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)}
    user, brands_by_generation = min(shop.users), {}
    async with serving(later, l2_deadline_ms=2_500.0) as running:

        async def has_previous() -> bool:
            return running.service.capture_served().previous is not None

        assert await eventually(has_previous)
        previous = running.service.capture_served().previous
        assert previous is not None
        for generation in (live, previous.generation):
            # When each is asked for the filter by its name
            body = {"entities": [user], "k": 5, "filter": "brand", "generation": generation}
            (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
            brands_by_generation[generation] = {brands[item_id] for item_id in answer["items"]}
        undeclared_response = await running.http.post(
            "/v1/lookup/user_topk", json={"entities": [user], "filter": "old"}
        )
        (previous_answer,) = (
            await running.post(
                "/v1/lookup/user_topk", {"entities": [user], "filter": "old", "generation": previous.generation}
            )
        )["answers"]

    # Then each answers with its own brand
    assert brands_by_generation == {live: {BRANDS[1]}, previous.generation: {BRANDS[0]}}
    assert undeclared_response.status_code == 422 and undeclared_response.json()["error"]["declared"] == ["brand"]
    assert previous_answer["items"]


def test_both_ways_send_the_same_bytes_under_a_name(shop: Shop) -> None:
    rng, at_once = random.Random(SEED), 0
    for ways in running(shop.night):
        for _ in range(60):
            table = rng.choice(["user_topk", "user_topk", "item_similar"])
            id_ = rng.choice(shop.ids if table == "item_similar" else [*sorted(shop.users), "nobody"])
            query = f"k={rng.randrange(1, 20)}&filter={rng.choice([*DECLARED, 'gone'])}".encode()
            request = AsgiRequest("GET", f"/v1/lookup/{table}/{quote(id_, safe='')}".encode(), query)
            fast_responses, routed = ways.send_both_ways(request)

            assert fast_responses == routed, f"seed {SEED}: {request}"
            assert ways.send(request) == routed[-1]
            at_once += ways.fast_lookups.answer(request.path + b"?" + query) is not None
    assert at_once > 10


def test_from_a_shell(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user, redis_url = min(shop.users), str(shop.night.redis_url)
    with started(environment(shop.night, tmp_path, REDIS_URL=redis_url)) as (_, url):
        arguments = ["user_topk", user, "--url", url, "--k", "10", "--json", "--filter", "in_stock"]
        assert lookup.main(arguments) == 0
        (answer,) = orjson.loads(capsys.readouterr().out)["answers"]
        assert explain_cli.main(arguments) == 0
        explanation = orjson.loads(capsys.readouterr().out)

    stocked = {
        id_ for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True) if item_attributes.get("stock")
    }
    assert len(answer["items"]) == 10 and set(answer["items"]) <= stocked
    assert explanation["filter"]["passing"] == len(stocked)


def test_the_plan_says_what_they_take_and_spare(shop: Shop) -> None:
    (generation_report,) = report_status(shop.night, read_state(shop.night))["generations"]
    manifest = read_manifest(shop.night.store(), generation_report["generation"])
    lists = top_lists(shop.night, manifest.generation, sorted(shop.users))
    parameters = PlanParameters(sample=1.0, seconds=0.1, data_until=DATA_UNTIL, qps=50.0)

    plan = forecast(shop.night, parameters)

    assert plan.to_json()["pages"].keys() == manifest.stored_tables.keys()
    assert plan.shape.payload_bytes == pytest.approx(total_bytes(manifest), rel=0.05)
    costs = {filter_cost.table_name: filter_cost for filter_cost in plan.filters}
    assert costs.keys() == {f"{table}.{name}" for table in LISTS for name in DECLARED}
    filtered_tables = {f"{table}.{name}" for name, tables in TABLES.items() for table in tables}
    assert {name for name, filter_cost in costs.items() if filter_cost.is_made_by_night} == filtered_tables
    attributes = dict(zip(shop.ids, shop.attributes, strict=True))
    for name, filter_ in DECLARED.items():
        root = read_filter(filter_).root_expression
        passing_counts = [sum(passes(root, attributes[item_id]) for item_id in items) for items in lists.values()]
        cost = costs[f"user_topk.{name}"]
        assert cost.passing_item_count == sum(passes(root, item_attributes) for item_attributes in shop.attributes)
        # The plan has timed half of the users, those of one shard, and predicts from these.
        assert cost.short_list_share == pytest.approx(np.mean([count < 50 for count in passing_counts]), abs=0.1)
        assert cost.short_list_share_at_ten == pytest.approx(np.mean([count < 10 for count in passing_counts]), abs=0.1)
        assert cost.redis_bytes > 0 and 0 < cost.pays_from_lookups < float("inf")
    rows = Console(file=(text := io.StringIO()), width=250)
    for printed_table in _forecast_tables(plan, [], parameters, 3, []):
        rows.print(printed_table)
    assert "user_topk.cheap-sale.1" in text.getvalue() and "lookups a day" in text.getvalue()
