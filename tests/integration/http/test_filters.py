"""Filters over HTTP: each answer is the best of what passes, by a look at every item; bad ones are refused."""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
import pytest
import redis

from cache.filters.expression import read_filter
from cache.filters.filtering import Filtering, MaskCache
from serving.admission.controller import Admission
from serving.cli import lookup
from serving.client import AsyncClient, Options
from serving.engine.entity import PendingAnswer
from serving.explain import cli as explain_cli
from serving.filters.filtered_lookup import FilteredLookup
from tests.integration.http.hot_way import AsgiRequest, Ways, running
from tests.integration.http.shop import BRANDS, Shop, filter_of, make_shop, wanted_of
from tests.integration.nights import NEXT, build_night, publish_night
from tests.integration.program import environment, started
from tests.integration.serving_app import BASE, Running, eventually, serving
from tests.unit.cache.filters.columns import passes

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
QUICK, STORM = 400, 10_000


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return make_shop(tmp_path_factory.mktemp("filters"), redis_url)


@pytest.fixture(scope="module", params=["reference", "cosine", "folded"])
def any_shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    """Of the reference bundle; of vectors compared by cosine; of vectors into which histories are folded."""
    if request.param == "reference":
        reference: Shop = request.getfixturevalue("shop")
        return reference
    return make_shop(tmp_path_factory.mktemp(request.param), redis_url, request.param)


@pytest.fixture(params=["json", "client", "arrow"])
def request_form(request: pytest.FixtureRequest) -> str:
    """Form of request and answer."""
    return str(request.param)


async def look_up(running: Running, form: str, user: str, filter_: Any, k: int, **more: Any) -> Any:
    """(items, scores, short, source) of one known user."""
    if form == "json":
        body = {"entities": [{"id": user, **more}], "k": k, "filter": filter_}
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
        scores = np.array(answer["scores"], np.float32)
        return answer["items"], scores, answer["short"], answer["source"]
    transport, is_binary = running.http._transport, form == "arrow"
    async with AsyncClient(BASE, transport=transport, binary=is_binary) as client:
        options = Options(k=k, filter=filter_, deadline_ms=5_000)
        if form == "client":
            client_answer = await client.lookup("user_topk", user, options)
        else:
            (client_answer,) = await client.lookup_many("user_topk", [user], options)
        return (list(client_answer.items or ()), client_answer.scores, client_answer.short, client_answer.source)


async def compare(shop: Shop, form: str, count: int) -> set[str]:
    """So many random users, filters and k; how they were answered."""
    rng, users, ways = random.Random(SEED), sorted(shop.users), set()
    async with serving(shop.night, l2_deadline_ms=2_500.0, sketch_s=0.0) as running:
        for _ in range(count):
            user, filter_, k = rng.choice(users), filter_of(rng), rng.randrange(1, 51)
            items, scores, short, source = await look_up(running, form, user, filter_, k)
            expected = wanted_of(shop, shop.users[user], shop.seen_ordinals[user], filter_, k, shop.metric)
            failure_message = f"seed {SEED}: {user} {k} {orjson.dumps(filter_).decode()}"
            assert items == expected[0], failure_message
            np.testing.assert_array_equal(scores, expected[1], err_msg=failure_message)
            assert short == (len(expected[0]) < k), failure_message
            ways.add(source)
    return ways


async def test_an_answer_is_the_best_of_what_passes(any_shop: Shop, request_form: str) -> None:
    assert await compare(any_shop, request_form, QUICK // 3) <= {"l1", "l2"}


@pytest.mark.storm
async def test_ten_thousand_answers_are_the_best_of_what_passes(any_shop: Shop) -> None:
    await compare(any_shop, "json", STORM // 3 + 1)


async def test_strangers_items_and_what_callers_leave_out(shop: Shop) -> None:
    rng = random.Random(SEED)
    ordinals = {id_: at for at, id_ in enumerate(shop.ids)}
    async with serving(shop.night, l2_deadline_ms=2_500.0, precision="fp32") as running:
        for _ in range(60):
            filter_, k = filter_of(rng), rng.randrange(1, 21)
            history, excluded_ids = rng.sample(shop.ids, 5), rng.sample(shop.ids, 8)
            failure_message = f"seed {SEED}: {k} {history} {orjson.dumps(filter_).decode()}"
            body = {"entities": [{"history": history}], "filter": filter_}
            (vector,) = (await running.post("/v1/lookup/user_vector", {"entities": body["entities"]}))["answers"]
            body |= {"k": k, "exclude": excluded_ids}
            (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
            excluded_ordinals = {ordinals[item_id] for item_id in (*history, *excluded_ids)}
            expected = wanted_of(shop, np.array(vector["vector"], np.float32), excluded_ordinals, filter_, k)
            assert answer["items"] == expected[0], failure_message
            assert answer["short"] == (len(expected[0]) < k), failure_message

            item = rng.choice(shop.ids)
            body = {"entities": [item], "k": k, "filter": filter_, "exclude": excluded_ids}
            (answer,) = (await running.post("/v1/lookup/item_similar", body))["answers"]
            item_ordinal = ordinals[item]
            excluded_ordinals = {item_ordinal, *(ordinals[item_id] for item_id in excluded_ids)}
            expected = wanted_of(shop, shop.vectors[item_ordinal], excluded_ordinals, filter_, k, metric="cosine")
            assert answer["items"] == expected[0], f"seed {SEED}: {item} {failure_message}"


async def test_a_stored_list_without_the_items_of_a_history_that_is_not_sent_is_no_whole_list(shop: Shop) -> None:
    entity = {"id": "almost-everything", "history": shop.ids[8:]}
    filter_ = {"==": ["brand", BRANDS[0]]}
    async with serving(shop.night, l2_deadline_ms=2_500.0, precision="fp32") as running:
        await running.post("/v1/lookup/user_topk", {"entities": [entity]})
        body = {"entities": [entity["id"]], "k": 20, "filter": filter_}
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]

    assert answer["source"] in ("l1", "l2") and set(answer["items"]) <= set(shop.ids[:8])
    assert (answer["reason"], answer["short"]) == ("filtered", False)


async def test_candidates_that_do_not_pass_are_named(shop: Shop) -> None:
    user, filter_ = min(shop.users), {"<": ["price", 50]}
    root = read_filter(filter_).root_expression
    passing_ids = {
        id_ for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True) if passes(root, item_attributes)
    }
    async with serving(shop.night) as running:
        body = {"user": user, "items": shop.ids[:40], "filter": filter_}
        answer = await running.post("/v1/score", body)

    assert set(answer["items"]) == passing_ids & set(shop.ids[:40])
    assert set(answer["filtered"]) == set(shop.ids[:40]) - passing_ids


async def test_it_is_explained_how_many_pass_and_from_where(shop: Shop) -> None:
    user = min(shop.users)
    async with serving(shop.night) as running:
        brand_filter = {"==": ["brand", BRANDS[0]]}
        all_ = {"or": [{"exists": "price"}, {"not": {"exists": "price"}}]}
        explanations = [
            await running.get(f"/v1/explain/user_topk/{user}", filter=orjson.dumps(filter_).decode(), k=20)
            for filter_ in (brand_filter, all_)
        ]  # fmt: skip

    assert [explanation["filter"]["from"] for explanation in explanations] == ["vectors", "list"]
    count = sum(item_attributes.get("brand") == BRANDS[0] for item_attributes in shop.attributes)
    assert explanations[0]["filter"]["passing"] == count and explanations[0]["filter"]["items"] == len(shop.ids)
    assert explanations[1]["filter"]["items_of_list"] == explanations[1]["record"]["items"]
    assert len(explanations[0]["filter"]["items_of_list"]) < 20 == len(explanations[0]["record"]["items"])


async def test_part_of_the_previous_list_is_marked_as_of_the_previous_generation(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_self: object, _served: object, cases: list[PendingAnswer], _context: object) -> list[None]:
        return [None] * len(cases)

    monkeypatch.setattr(FilteredLookup, "_vectors_of", none)
    shop = make_shop(tmp_path, redis_url)
    live = publish_night(shop.night, NEXT)
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(f"larder:1:{shop.night.namespace}:g:{live}:user_topk:*"):
            client.delete(key)
    body = {"entities": [{"id": min(shop.users)}], "k": 30, "filter": {"==": ["brand", BRANDS[0]]}}
    async with serving(shop.night, l2_deadline_ms=2_500.0, sketch_s=0.0) as running:

        async def has_previous() -> bool:
            return running.service.capture_served().previous is not None

        assert await eventually(has_previous)
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]

    assert (answer["source"], answer["reason"]) == ("previous", "filtered")
    assert answer["generation"] != live and 0 < len(answer["items"]) < 30


def test_from_a_shell(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user, filter_ = min(shop.users), '{"==": ["brand", "brand-0"]}'
    brands = {id_: item_attributes.get("brand") for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)}
    redis_url = str(shop.night.redis_url)
    with started(environment(shop.night, tmp_path, REDIS_URL=redis_url)) as (_, url):
        arguments = ["user_topk", user, "--url", url, "--k", "10", "--json", "--filter"]
        assert lookup.main([*arguments, filter_]) == 0
        (answer,) = orjson.loads(capsys.readouterr().out)["answers"]
        assert explain_cli.main([*arguments, filter_]) == 0
        explanation = orjson.loads(capsys.readouterr().out)
        with pytest.raises(SystemExit):
            lookup.main([*arguments, "{"])

    assert {brands[item_id] for item_id in answer["items"]} == {"brand-0"}
    assert explanation["filter"]["passing"] == sum(brand == "brand-0" for brand in brands.values())
    assert "--filter must be a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("filter_", "code", "field"),
    [
        ({"==": ["colour", "red"]}, "unknown_attribute", "filter.=="),
        ({"and": [{"exists": "brand"}, {"<": ["brand", "x"]}]}, "invalid_filter", "filter.and[1].<"),
        ({"<": ["price", "cheap"]}, "invalid_filter", "filter.<"),
        ({"near": ["price", 1]}, "invalid_filter", "filter"),
        ("price < 20", "invalid_filter", "filter"),
    ],
)  # fmt: skip
async def test_a_bad_filter_is_refused(shop: Shop, filter_: Any, code: str, field: str) -> None:
    async with serving(shop.night) as running:
        body = {"entities": ["u-00001"], "filter": filter_}
        responses = [
            await running.http.post("/v1/lookup/user_topk", json=body),
            await running.http.get(
                "/v1/lookup/user_topk/u-00001", params={"filter": orjson.dumps(filter_).decode()}
            ),
            await running.http.post("/v1/score", json={"user": "u", "items": ["i"], "filter": filter_}),
        ]  # fmt: skip

    for response in responses:
        error = response.json()["error"]
        assert response.status_code == 422 and (error["code"], error["field"]) == (code, field)
    if code == "unknown_attribute":
        assert responses[0].json()["error"]["attributes"] == {
            "brand": "text", "price": "number", "since": "time", "stock": "flag", "tags": "texts",
        }  # fmt: skip


async def test_only_lists_are_filtered_and_only_where_items_have_attributes(
    shop: Shop, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> None:
    async with serving(shop.night) as running:
        body = {"entities": ["u-00001"], "filter": {"exists": "brand"}}
        response = await running.http.post("/v1/lookup/user_vector", json=body)
        text = await running.http.get("/v1/lookup/user_topk/u-00001", params={"filter": "{"})
    assert response.status_code == 422 and "has no lists" in response.json()["error"]["message"]
    assert text.status_code == 422 and "filter is not JSON" in text.json()["error"]["message"]

    night_without_attributes = build_night(tmp_path_factory.mktemp("plain"), redis_url, users=60, items=60)
    async with serving(night_without_attributes) as running:
        response = await running.http.post("/v1/lookup/user_topk", json=body)
    error = response.json()["error"]
    assert response.status_code == 422 and error["code"] == "unknown_attribute"
    assert "[sources] item_attributes" in error["message"]


async def test_where_no_vector_can_be_had_a_list_answers_as_far_as_it_goes(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_self: object, _served: object, cases: list[PendingAnswer], _context: object) -> list[None]:
        return [None] * len(cases)

    monkeypatch.setattr(FilteredLookup, "_vectors_of", none)
    body = {"entities": [{"id": min(shop.users)}], "k": 30, "filter": {"==": ["brand", BRANDS[0]]}}
    async with serving(shop.night, l2_deadline_ms=2_500.0, sketch_s=0.0) as running:
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]

    assert (answer["source"], answer["reason"], answer["short"]) == ("l2", "filtered", False)
    brands = {id_: item_attributes.get("brand") for id_, item_attributes in zip(shop.ids, shop.attributes, strict=True)}
    assert 0 < len(answer["items"]) < 30
    assert {brands[item_id] for item_id in answer["items"]} == {BRANDS[0]}


async def test_under_overload_nothing_is_searched_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "admit_live", lambda _self: False)
    filter_ = {"==": ["brand", BRANDS[0]]}
    body = {"entities": [{"id": min(shop.users)}], "k": 30, "filter": filter_}
    async with serving(shop.night, l2_deadline_ms=2_500.0, sketch_s=0.0) as running:
        (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
        (single_item_answer,) = (await running.post("/v1/lookup/user_topk", body | {"k": 1}))["answers"]

    assert (answer["source"], answer["reason"], answer["live"]) == ("l2", "filtered", "overloaded")
    assert 0 < len(answer["items"]) < 30 and not answer["short"]
    assert "live" not in single_item_answer and len(single_item_answer["items"]) == 1  # the list has enough


@pytest.mark.parametrize("user", ["known", "nobody"])
async def test_short_means_that_fewer_pass_in_all_also_of_what_is_not_found_by_vectors(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    async def none(_self: object, _served: object, cases: list[PendingAnswer], _context: object) -> list[None]:
        return [None] * len(cases)

    monkeypatch.setattr(FilteredLookup, "_vectors_of", none)
    known_user = min(shop.users)
    seen_ordinals = shop.seen_ordinals[known_user] if user == "known" else set()
    filter_ = {"==": ["brand", BRANDS[0]]}
    passing_ordinals = [
        at for at, item_attributes in enumerate(shop.attributes) if item_attributes.get("brand") == BRANDS[0]
    ]
    unseen_ordinals = [at for at in passing_ordinals if at not in seen_ordinals]
    excluded_ids = [shop.ids[at] for at in unseen_ordinals[40:]] + ["no-such-item"]
    shorts = []
    async with serving(shop.night, l2_deadline_ms=2_500.0, sketch_s=0.0) as running:
        for k in (40, 41):
            id_ = known_user if user == "known" else user
            body = {"entities": [id_], "k": k, "filter": filter_, "exclude": excluded_ids}
            (answer,) = (await running.post("/v1/lookup/user_topk", body))["answers"]
            assert len(answer["items"]) < 40
            shorts.append(answer["short"])

    assert len(unseen_ordinals) > 41 and shorts == [False, True]


@pytest.fixture
def ways(shop: Shop) -> Iterator[Ways]:
    yield from running(shop.night)


def test_both_ways_send_the_same_bytes_under_a_filter(shop: Shop, ways: Ways) -> None:
    rng, users, at_once = random.Random(SEED), sorted(shop.users), 0
    for _ in range(QUICK // 4):
        filter_ = quote(orjson.dumps(filter_of(rng)).decode(), safe="")
        query = f"k={rng.randrange(1, 40)}&filter={filter_}".encode()
        table = rng.choice(["user_topk", "user_topk", "item_similar", "user_vector"])
        id_ = rng.choice(shop.ids if table == "item_similar" else [*users, "nobody"])
        request = AsgiRequest("GET", f"/v1/lookup/{table}/{quote(id_, safe='')}".encode(), query)
        # The first request computes what passes and fills L1, the second makes the answer ready, the third sends it.
        fast_responses, routed = ways.send_both_ways(request)

        assert fast_responses == routed, f"seed {SEED}: {request}"
        assert ways.send(request) == routed[-1]
        at_once += ways.fast_lookups.answer(request.path + b"?" + query) is not None
    assert at_once > QUICK // 40


def test_an_answer_under_a_filter_is_counted_once(shop: Shop, ways: Ways) -> None:
    # Given a filter that is answered from vectors, and one that is answered from the list
    selective_filter, permissive_filter = {"==": ["brand", BRANDS[0]]}, {"exists": "price"}
    for filter_, k in ((selective_filter, 50), (permissive_filter, 5)):
        query = f"k={k}&filter={quote(orjson.dumps(filter_).decode(), safe='')}".encode()
        request = AsgiRequest("GET", f"/v1/lookup/user_topk/{min(shop.users)}".encode(), query)
        counts = []
        for is_fast in (False, True):
            ways.forget()
            ways.send(request, is_fast=False)
            counts_before = ways.scraped("larder_answers_total"), ways.service.tiers.counters.result_total
            ways.send(request, is_fast=is_fast)
            after = ways.scraped("larder_answers_total"), ways.service.tiers.counters.result_total
            answered = {name: count - counts_before[0].get(name, 0) for name, count in after[0].items()}
            counts.append((answered, after[1] - counts_before[1]))
        assert counts[0] == counts[1], f"seed {SEED}: {filter_}"
        assert sum(counts[0][0].values()) >= 1


@pytest.mark.storm
def test_an_hour_of_distinct_filters_does_not_grow_memory(shop: Shop) -> None:
    users, count = sorted(shop.users), 18_432  # five a second
    for ways in running(shop.night, l1_bytes=1 << 20):
        live = ways.service.capture_served().live
        filtering = live.part(Filtering)
        assert filtering is not None
        # Set a bound that a few filters reach.
        filtering._masks = MaskCache(filtering._masks.attributes, 100 << 10)

        def send_and_measure_memory(first: int, ways: Ways = ways) -> int:
            for number in range(first, first + count):
                filter_ = quote(f'{{"<":["price",{1 + number / 1e6}]}}', safe="")
                id_ = quote(users[number % len(users)], safe="")
                path = f"/v1/lookup/user_topk/{id_}".encode()
                response = ways.send(AsgiRequest("GET", path, f"k=3&filter={filter_}".encode()))
                assert response.status == 200
            gc.collect()
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        bytes_before = send_and_measure_memory(0)
        after = send_and_measure_memory(count)
        assert filtering._masks._cached_masks.currsize <= 100 << 10
        assert after - bytes_before < 2 << 20, f"{(after - bytes_before) / count:.0f} bytes for each filter"
