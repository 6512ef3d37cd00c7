"""Facets over HTTP: the best items with a value of an attribute, by a look at each item; nothing made up for others."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from cache.errors import ConfigError
from precompute.config.settings import FacetConfig, NightConfig, Sources
from serving.client import AsyncClient, Options
from tests.integration.http import shop as shop_module
from tests.integration.http.hot_way import AsgiRequest, running
from tests.integration.http.shop import BRANDS, TAGS, Shop, drawn, make_shop
from tests.integration.nights import NEXT, histories, publish_night
from tests.integration.serving_app import BASE, eventually, serving

FACETS = {"brands": FacetConfig("brand", 12), "tagged": FacetConfig("tags", 7)}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return make_shop(tmp_path_factory.mktemp("facets"), redis_url, facets=FACETS)


def best_of(shop: Shop, attribute: str, value: str, k: int, scores: list[float]) -> list[str]:
    """Ids of the best k with a value, ties by ordinal, by a look at each item."""

    def has_value(item_attributes: Mapping[str, Any]) -> bool:
        if attribute == "tags":
            return value in item_attributes.get(attribute, ())
        return bool(item_attributes.get(attribute) == value)

    having = [at for at, attributes in enumerate(shop.attributes) if has_value(attributes)]
    return [shop.ids[at] for at in sorted(having, key=lambda at: (-scores[at], at))[:k]]


def clicks_of(shop: Shop) -> list[float]:
    """Interactions of each item, as the defaults count them."""
    counts = Counter(item for history in histories(shop.night).values() for item in history)
    return [counts[id_] for id_ in shop.ids]


async def test_a_value_is_answered_with_the_best_items_that_have_it(shop: Shop) -> None:
    clicks = clicks_of(shop)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        for name, values in (("brands", BRANDS), ("tagged", TAGS)):
            facet = FACETS[name]
            body = {"entities": values}
            for _ in range(2):  # from Redis, then from memory
                answers = (await running.post(f"/v1/lookup/{name}", body))["answers"]
                for value, answer in zip(values, answers, strict=True):
                    expected_ids = best_of(shop, facet.attribute, value, facet.k, clicks)
                    assert answer["items"] == expected_ids, value
                    assert answer["table"] == name and answer["producer"] == "batch"
                    assert answer["short"] == (len(expected_ids) < facet.k)
                    assert answer["scores"] == sorted(answer["scores"], reverse=True)
            assert {answer["source"] for answer in answers} == {"l1"}
        brand_answer = await running.get(f"/v1/lookup/brands/{quote(BRANDS[-2], safe='')}", k=3)
        async with AsyncClient(BASE, transport=running.http._transport, binary=True) as client:
            (tag_answer,) = await client.lookup_many("tagged", ["sale"], Options(k=2))

    assert brand_answer["items"] == best_of(shop, "brand", BRANDS[-2], 3, clicks)
    assert list(tag_answer.items or ()) == best_of(shop, "tags", "sale", 2, clicks)


async def test_an_unknown_value_has_no_items(shop: Shop) -> None:
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        answers = [
            await running.get("/v1/lookup/brands/no-such-brand"),
            (await running.post(
                "/v1/lookup/brands", {"entities": [{"id": "brand", "history": shop.ids[:3]}]}
            ))["answers"][0],
        ]  # fmt: skip

    for answer in answers:
        assert (answer["items"], answer["short"]) == ([], True)
        assert (answer["source"], answer["reason"]) == ("default", "not_in_generation")
        assert answer["producer"] is None


async def test_what_is_left_out_is_left_out(shop: Shop) -> None:
    full_list = best_of(shop, "brand", BRANDS[0], 12, clicks_of(shop))
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        body: dict[str, Any] = {"entities": [BRANDS[0]], "exclude": full_list[:2]}
        (answer,) = (await running.post("/v1/lookup/brands", body))["answers"]
        varied = {"diversify": {"attribute": "stock", "most": 1}}
        body = {"entities": [BRANDS[0]], "rerank": varied}
        (diversified_answer,) = (await running.post("/v1/lookup/brands", body))["answers"]
        explanation = await running.get(f"/v1/explain/brands/{BRANDS[0]}")
        refused = [
            await running.http.post("/v1/lookup/brands", json={"entities": [BRANDS[0]], "filter": {"exists": "price"}}),
            await running.http.get(f"/v1/lookup/brands/{BRANDS[0]}", params={"filter": '{"exists":"price"}'}),
        ]

    assert answer["items"] == full_list[2:] and answer["short"]
    assert 0 < len(diversified_answer["items"]) < 12 and diversified_answer["reranked"] == "diversify"
    assert explanation["record"]["items"] == full_list and explanation["page"]["state"] == "ok"
    for response in refused:
        assert response.status_code == 422 and response.json()["error"]["code"] == "invalid_filter"


def test_both_ways_send_the_same_bytes(shop: Shop) -> None:
    for ways in running(shop.night):
        for value in (*BRANDS, "no-such-brand"):
            request = AsgiRequest("GET", f"/v1/lookup/brands/{quote(value, safe='')}".encode(), b"k=3")
            fast_responses, routed = ways.send_both_ways(request)
            assert fast_responses == routed, value


async def test_a_value_that_is_gone_is_not_answered_by_the_night_before(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> None:
    # Given a night with a facet, and one in which it is of another attribute; tables may appear and disappear
    folder = tmp_path_factory.mktemp("gone")
    shop = make_shop(folder, redis_url, facets={"shelf": FacetConfig("brand", 5)})
    later = replace(shop.night, facets={"shelf": FacetConfig("tags", 5)})
    publish_night(later, NEXT)
    async with serving(later, l2_deadline_ms=2_500.0) as running:

        async def has_previous() -> bool:
            return running.service.capture_served().previous is not None

        assert await eventually(has_previous)
        answers = (await running.post("/v1/lookup/shelf", {"entities": [BRANDS[0], "sale"]}))["answers"]

    assert (answers[0]["items"], answers[0]["source"]) == ([], "default")
    assert answers[1]["items"]


async def test_without_interactions_they_go_by_the_mean_score(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> None:
    shop = make_shop(tmp_path_factory.mktemp("mean"), redis_url, "alone", facets={"brands": FacetConfig("brand", 600)})
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        answers = (await running.post("/v1/lookup/brands", {"entities": BRANDS}))["answers"]
        live = running.service.capture_served().live
        defaults = orjson.loads((live.generation_folder / "defaults.json").read_bytes())["user_topk"]["items"]

    items_by_value = {answer["id"]: answer["items"] for answer in answers}
    of = {id_: item_attributes.get("brand") for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)}
    for value, items in items_by_value.items():
        assert set(items) == {id_ for id_, brand in of.items() if brand == value}
        among = [item_id for item_id in defaults if of[item_id] == value]
        assert items[: len(among)] == among


async def test_a_facet_without_values_answers_nothing(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(rng: random.Random) -> dict[str, Any]:
        return {name: attribute_value for name, attribute_value in drawn(rng).items() if name != "brand"}

    monkeypatch.setattr(shop_module, "drawn", without)
    bare = make_shop(tmp_path, redis_url, facets={"brands": FacetConfig("brand")})
    async with serving(bare.night) as running:
        answer = await running.get(f"/v1/lookup/brands/{BRANDS[0]}")

    assert (answer["items"], answer["reason"]) == ([], "not_in_generation")


@pytest.mark.parametrize(
    ("facets", "message"),
    [
        ({"user_topk": FacetConfig("brand")}, "the name of another table"),
        ({"shelf": FacetConfig("colour")}, "facets.shelf is of 'colour'; sources.item_attributes has brand"),
        ({"a shelf": FacetConfig("brand")}, "the name of a facet has 1 to 64"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(facets: Any, message: str) -> None:
    sources = Sources(item_features="items.parquet", item_attributes=("brand",))
    with pytest.raises(ConfigError, match=message):
        NightConfig(sources=sources, facets=facets)
    assert b"facets" not in NightConfig(sources=sources).semantic_settings_bytes()


def test_a_facet_of_numbers_is_refused(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(ConfigError, match="of kind number, but facets are of text and texts"):
        make_shop(tmp_path, redis_url, facets={"prices": FacetConfig("price")})
