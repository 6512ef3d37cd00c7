"""Re-ranking over HTTP: a list, or what passes of all, in the order that a look at every item gives."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import redis

from cache.errors import ConfigError
from cache.filters.expression import read_filter
from serving.cli import lookup
from serving.client import AsyncClient, Options
from serving.config.settings import ServingConfig, check_configured_files
from tests.integration.http.shop import BRANDS, Shop, filter_of, make_shop, wanted_of
from tests.integration.nights import NEXT, build_night, publish_night
from tests.integration.program import environment, started
from tests.integration.serving_app import BASE, Running, eventually, serving
from tests.unit.cache.filters.columns import passes

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
COUNT = 24
WIDTH = 50
DECLARED = {"varied": {"diversify": {"attribute": "brand", "most": 1}}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return make_shop(tmp_path_factory.mktemp("reranking"), redis_url)


def rerank_of(rng: random.Random) -> dict[str, Any]:
    """Boosts, a bound by attribute, or both."""
    boosts = [{"filter": filter_of(rng), "factor": rng.choice([0.25, 0.5, 1.5, 4])} for _ in range(rng.randrange(1, 4))]
    attribute = rng.choice(["brand", "tags", "stock", "price"])
    diversify = {"attribute": attribute, "most": rng.randrange(1, 6)}
    return rng.choice([{"boost": boosts}, {"diversify": diversify}, {"boost": boosts, "diversify": diversify}])


def by_hand(shop: Shop, ids: list[str], scores: Any, rerank: dict[str, Any], k: int) -> list[str]:
    """Ids of the candidates in their new order, by a look at each."""
    ordinals = {id_: at for at, id_ in enumerate(shop.ids)}
    of = {id_: shop.attributes[ordinals[id_]] for id_ in ids}
    scored = {id_: float(score) for id_, score in zip(ids, scores, strict=True)}
    for boost in rerank.get("boost", ()):
        root = read_filter(boost["filter"]).root_expression
        for id_ in ids:
            if passes(root, of[id_]):
                score = scored[id_]
                scored[id_] = score * boost["factor"] if score >= 0 else score * (1 / boost["factor"])
    order = sorted(ids, key=lambda id_: -scored[id_])
    bound = rerank.get("diversify")
    if bound is None:
        return order[:k]
    counts: Counter[Any] = Counter()
    selected_ids: list[str] = []
    for id_ in order:
        value = of[id_].get(bound["attribute"], ())
        values = set(value) if isinstance(value, tuple) else {value}
        if len(selected_ids) < k and all(counts[attribute_value] < bound["most"] for attribute_value in values):
            counts.update(values)
            selected_ids.append(id_)
    return selected_ids


async def answer_of(running: Running, form: str, user: str, **options: Any) -> tuple[Any, ...]:
    """(items, short, reranked, generation's scores) by one of the ways."""
    if form == "json":
        body = {"entities": [{"id": user}], **options}
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
        return answer["items"], answer["short"], answer.get("reranked")
    if form == "url":
        texts = {
            name: option if isinstance(option, str | int) else orjson.dumps(option).decode()
            for name, option in options.items()
        }
        answer = await running.get(f"/v1/lookup/user_topk/{user}", **texts)
        return answer["items"], answer["short"], answer.get("reranked")
    transport = running.http._transport
    async with AsyncClient(BASE, transport=transport, binary=form == "arrow") as client:
        (client_answer,) = await client.lookup_many("user_topk", [user], Options(**options))
        return list(client_answer.items or ()), client_answer.short, client_answer.reranked


def named(rerank: dict[str, Any]) -> str:
    return "+".join(rerank_kind for rerank_kind in ("boost", "diversify") if rerank_kind in rerank)


@pytest.mark.parametrize("form", ["json", "url", "client", "arrow"])
async def test_a_list_is_put_in_order(shop: Shop, form: str) -> None:
    rng, users = random.Random(SEED), sorted(shop.users)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        for _ in range(COUNT):
            user, rerank, k = rng.choice(users), rerank_of(rng), rng.randrange(1, WIDTH + 1)
            full_answer = await running.get(f"/v1/lookup/user_topk/{user}")
            items, short, reranked_by = await answer_of(running, form, user, k=k, rerank=rerank)
            expected_ids = by_hand(shop, full_answer["items"], full_answer["scores"], rerank, k)
            failure_message = f"seed {SEED}: {user} {k} {orjson.dumps(rerank).decode()}"
            assert items == expected_ids, failure_message
            assert (short, reranked_by) == (len(expected_ids) < k, named(rerank)), failure_message


async def test_under_a_filter_the_candidates_are_the_best_that_pass(shop: Shop) -> None:
    rng, users = random.Random(SEED), sorted(shop.users)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:
        for _ in range(COUNT):
            user, rerank, filter_ = rng.choice(users), rerank_of(rng), filter_of(rng)
            k = rng.randrange(1, 21)
            failure_message = f"seed {SEED}: {user} {k} {filter_} {orjson.dumps(rerank).decode()}"
            full_answer = await running.get(f"/v1/lookup/user_topk/{user}")
            root, ordinals = (read_filter(filter_).root_expression, {id_: at for at, id_ in enumerate(shop.ids)})
            pairs = [
                (id_, score)
                for id_, score in zip(full_answer["items"], full_answer["scores"], strict=True)
                if passes(root, shop.attributes[ordinals[id_]])
            ]
            expected_ids = by_hand(
                shop, [component for component, _ in pairs], [component for _, component in pairs], rerank, k
            )
            if len(expected_ids) < k:  # the list does not do
                passing_candidates = wanted_of(shop, shop.users[user], shop.seen_ordinals[user], filter_, WIDTH)
                expected_ids = by_hand(shop, *passing_candidates, rerank, k)
            items, *_ = await answer_of(running, "json", user, k=k, filter=filter_, rerank=rerank)
            assert items == expected_ids, failure_message


async def test_candidates_of_a_caller_are_put_in_order(shop: Shop) -> None:
    rng, user = random.Random(SEED), min(shop.users)
    async with serving(shop.night) as running:
        for _ in range(COUNT // 4):
            rerank, body = rerank_of(rng), {"user": user, "items": rng.sample(shop.ids, 60)}
            scored_answer = await running.post("/v1/score", body)
            reranked_answer = await running.post("/v1/score", body | {"rerank": rerank, "k": 20})
            expected_ids = by_hand(shop, scored_answer["items"], scored_answer["scores"], rerank, 20)
            assert reranked_answer["items"] == expected_ids, f"seed {SEED}: {rerank}"
            assert reranked_answer["reranked"] == named(rerank)


async def test_what_is_alike_gives_way(shop: Shop) -> None:
    user = min(shop.users)
    vectors = shop.vectors / np.linalg.norm(shop.vectors, axis=1, keepdims=True)
    ordinals = {id_: at for at, id_ in enumerate(shop.ids)}

    def likeness(ids: list[str]) -> float:
        units = vectors[[ordinals[id_] for id_ in ids]]
        return float(np.triu(units @ units.T, 1).sum())

    async with serving(shop.night) as running:
        rerank_options = [None, *({"diversify": {"mmr": weight}} for weight in (1.0, 0.02))]
        lists = [(await answer_of(running, "json", user, k=10, rerank=rerank))[0] for rerank in rerank_options]

    assert lists[0] == lists[1]  # a weight of 1 is the score alone
    assert likeness(lists[0]) > 1.5 * likeness(lists[2])


async def test_a_declared_one_goes_by_its_name_and_is_explained(shop: Shop) -> None:
    user = min(shop.users)
    async with serving(shop.night, rerank=DECLARED) as running:
        full_answer = await running.get(f"/v1/lookup/user_topk/{user}")
        items, _, reranked_by = await answer_of(running, "url", user, k=5, rerank="varied")
        expected_ids = by_hand(shop, full_answer["items"], full_answer["scores"], DECLARED["varied"], 5)
        explanation = await running.get(f"/v1/explain/user_topk/{user}", k=5, rerank="varied")
        refused = await running.http.get(f"/v1/lookup/user_topk/{user}", params={"rerank": "other"})

    assert (items, reranked_by) == (expected_ids, "diversify")
    assert explanation["rerank"] == {"by": "diversify", "items_of_list": expected_ids}
    error = refused.json()["error"]
    assert refused.status_code == 422
    assert (error["code"], error["field"], error["declared"]) == ("unknown_rerank", "rerank", ["varied"])  # fmt: skip


async def test_strangers_get_the_defaults_in_order(shop: Shop) -> None:
    rerank = {"boost": [{"filter": {"==": ["brand", BRANDS[1]]}, "factor": 4}]}
    async with serving(shop.night) as running:
        default_answer = await running.get("/v1/lookup/user_topk/nobody", k=10)
        items, _, reranked_by = await answer_of(running, "json", "nobody", k=10, rerank=rerank)
        wide = await running.get("/v1/lookup/user_topk/nobody")

    assert default_answer["source"] == "default" and reranked_by == "boost"
    assert items[:1] == by_hand(shop, wide["items"], wide["scores"], rerank, 1)
    brands = {id_: item_attributes.get("brand") for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)}
    assert brands[items[0]] == BRANDS[1] != brands[default_answer["items"][0]]


async def test_an_older_list_is_put_in_order_too_and_none_is_where_that_cannot_be(
    tmp_path: Path, redis_url: str
) -> None:
    shop = make_shop(tmp_path, redis_url)
    live = publish_night(shop.night, NEXT)
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(f"larder:1:{shop.night.namespace}:g:{live}:user_topk:*"):
            client.delete(key)
    async with serving(shop.night, l2_deadline_ms=2_500.0) as running:

        async def has_previous() -> bool:
            return running.service.capture_served().previous is not None

        assert await eventually(has_previous)
        user = min(shop.users)
        full_answer = await running.get(f"/v1/lookup/user_topk/{user}")
        body = {"entities": [user], "k": 5, "rerank": DECLARED["varied"]}
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]

    assert (answer["source"], answer["reranked"]) == ("previous", "diversify")
    assert answer["items"] == by_hand(shop, full_answer["items"], full_answer["scores"], DECLARED["varied"], 5)


@pytest.mark.parametrize(
    ("rerank", "code", "field"),
    [
        ({"diversify": {"attribute": "colour", "most": 1}}, "unknown_attribute", "diversify.attribute"),
        ({"boost": [{"filter": {"exists": "x"}, "factor": 2}]}, "unknown_attribute", "boost[0].filter.exists"),
        ({"boost": [{"filter": {"<": ["price", "x"]}, "factor": 2}]}, "invalid_filter", "boost[0].filter.<"),
        ({"boost": [{"filter": {"exists": "price"}, "factor": 9}]}, "invalid_rerank", "boost[0].factor"),
        ({"boost": [{"filter": {"exists": "price"}}]}, "invalid_rerank", "boost[0].factor"),
        ([1], "invalid_rerank", ""), (7, "invalid_rerank", ""), ("nothing", "unknown_rerank", ""),
    ],
)  # fmt: skip
async def test_a_bad_one_is_refused(shop: Shop, rerank: Any, code: str, field: str) -> None:
    async with serving(shop.night) as running:
        for path, body in (
            ("/v1/lookup/user_topk", {"entities": ["u-00001"]}),
            ("/v1/score", {"user": "u-00001", "items": shop.ids[:3]}),
        ):
            response = await running.http.post(path, json=body | {"rerank": rerank})
            error = response.json()["error"]
            assert response.status_code == 422
            assert (error["code"], error["field"]) == (code, f"rerank.{field}".rstrip("."))


async def test_only_lists_are_put_in_order(
    shop: Shop, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> None:
    async with serving(shop.night) as running:
        body = {"entities": ["u-00001"], "rerank": {"diversify": {"mmr": 0.5}}}
        response = await running.http.post("/v1/lookup/user_vector", json=body)
        text = await running.http.get("/v1/lookup/user_topk/u", params={"rerank": "{"})
    assert response.status_code == 422 and "has no lists" in response.json()["error"]["message"]
    assert text.status_code == 422 and "rerank is not JSON" in text.json()["error"]["message"]

    # Diversity by vectors needs no attributes.
    night_without_attributes = build_night(tmp_path_factory.mktemp("plain"), redis_url, users=60, items=60)
    async with serving(night_without_attributes) as running:
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
    assert answer["reranked"] == "diversify"


def test_a_declared_one_that_is_none_stops_the_service_before_it_starts() -> None:
    config = ServingConfig(rerank={"varied": {"diversify": {"most": 2}}})
    with pytest.raises(ConfigError, match=r"\[serving\.rerank\.varied\.diversify\]: diversify must have"):
        check_configured_files(config)


def test_from_a_shell(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rerank = orjson.dumps(DECLARED["varied"]).decode()
    with started(environment(shop.night, tmp_path, REDIS_URL=str(shop.night.redis_url))) as (_, url):
        arguments = ["user_topk", min(shop.users), "--url", url, "--k", "5", "--json", "--rerank", rerank]
        assert lookup.main(arguments) == 0
    (answer,) = orjson.loads(capsys.readouterr().out)["answers"]
    brands = {id_: item_attributes.get("brand") for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)}
    counts = Counter(brands[item_id] for item_id in answer["items"])
    counts.pop(None, None)
    assert answer["reranked"] == "diversify" and set(counts.values()) == {1}
