"""Every route over a real night: what is answered, what is refused, and that it is what the night computed."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from cache.format.item_table import ItemTable
from cache.l2.pool import PipelinePool
from cache.store.releases import newest_release
from precompute.config.settings import NightConfig
from serving.client import AsyncClient, InvalidRequest, Options
from tests.integration.nights import K, build_night, histories, top_lists
from tests.integration.serving_app import BASE, Running, serving
from tests.opened import open_generation


@pytest.fixture(scope="module", params=["fast", "plain"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which way the service answers."""
    return str(request.param)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str, transport: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp(transport), redis_url)


@pytest.fixture
async def app(night: NightConfig, transport: str) -> AsyncIterator[Running]:
    async with serving(night, fast_http=transport == "fast") as running:
        yield running


@pytest.fixture(scope="module")
def generation(night: NightConfig) -> str:
    release = newest_release(night.store())
    assert release is not None
    return release.generation


def known_users(night: NightConfig, count: int) -> list[str]:
    return sorted(histories(night))[:count]


async def test_served_lists_are_those_of_the_night(app: Running, night: NightConfig, generation: str) -> None:
    users = known_users(night, 200)
    expected = top_lists(night, generation, users)

    body = await app.post("/v1/lookup/user_topk", {"entities": users})

    assert {answer["id"]: tuple(answer["items"]) for answer in body["answers"]} == dict(expected)
    assert {answer["source"] for answer in body["answers"]} == {"l2"}
    assert {answer["generation"] for answer in body["answers"]} == {generation}


async def test_one_entity_by_url_says_where_it_comes_from(app: Running, night: NightConfig, generation: str) -> None:
    user = known_users(night, 1)[0]

    first = await app.get(f"/v1/lookup/user_topk/{user}", k=10)
    second = await app.get(f"/v1/lookup/user_topk/{user}", k=10)

    assert (first["source"], second["source"]) == ("l2", "l1")
    assert len(first["items"]) == len(first["scores"]) == 10 and not first["short"]
    assert first["scores"] == sorted(first["scores"], reverse=True)
    assert first["producer"] == "batch" and first["generation"] == generation
    assert first["age_seconds"] > 0 and first["published_at"].endswith("Z")
    assert "reason" not in first and not set(first["items"]) & set(histories(night)[user])


async def test_every_table_answers_in_its_own_shape(app: Running, night: NightConfig) -> None:
    user = known_users(night, 1)[0]
    item = histories(night)[user][0]
    entities = [
        {"table": "user_topk", "id": user},
        {"table": "user_vector", "id": user},
        {"table": "item_vector", "id": item},
        {"table": "item_similar", "id": item},
        {"table": "user_affinity", "id": user},
    ]

    top, vector, item_vector, similar, affinity = (await app.post("/v1/lookup", {"entities": entities, "k": 5}))[
        "answers"
    ]

    assert len(top["items"]) == len(similar["items"]) == 5 and item not in similar["items"]
    assert len(vector["vector"]) == len(item_vector["vector"]) == 16
    assert len(affinity["values"]) == len(affinity["labels"]) > 1
    assert len({answer["generation"] for answer in (top, vector, item_vector, similar, affinity)}) == 1


async def test_an_unknown_user_gets_defaults_and_with_a_history_a_live_answer(app: Running, night: NightConfig) -> None:
    history = histories(night)[known_users(night, 1)[0]]
    new = {"id": "a user/of tomorrow", "history": [*history, "no-such-item"]}

    default_answer = await app.get("/v1/lookup/user_topk/a user%2Fof tomorrow", k=5)
    live = (await app.post("/v1/lookup/user_topk", {"entities": [new]}))["answers"][0]
    repeated_answer = (await app.post("/v1/lookup/user_topk", {"entities": [new]}))["answers"][0]
    vector = (await app.post("/v1/lookup/user_vector", {"entities": [new]}))["answers"][0]
    affinity = await app.get("/v1/lookup/user_affinity/nobody")

    assert (default_answer["source"], default_answer["reason"]) == ("default", "not_in_generation")
    assert (live["source"], repeated_answer["source"], vector["source"]) == ("live", "l1", "live")
    assert live["dropped_history"] == 1 and len(live["items"]) == K
    assert not set(history) & set(live["items"])
    assert affinity["values"] is None and affinity["reason"] == "not_in_generation"


async def test_a_live_answer_agrees_with_what_the_night_computed_from_the_same_history(
    app: Running, night: NightConfig
) -> None:
    users = known_users(night, 40)
    history_by_user = histories(night)
    strangers = [{"id": f"twin of {user}", "history": history_by_user[user]} for user in users]

    stored_answers = (await app.post("/v1/lookup/user_topk", {"entities": users, "k": 20}))["answers"]
    live = (await app.post("/v1/lookup/user_topk", {"entities": strangers, "k": 20}))["answers"]

    overlaps = [
        len(set(stored_answer["items"]) & set(live_answer["items"])) / 20
        for stored_answer, live_answer in zip(stored_answers, live, strict=True)
    ]
    assert {answer["source"] for answer in live} == {"live"}
    assert np.mean(overlaps) > 0.9


async def test_fresh_is_computed_and_the_batch_answer_stays(app: Running, night: NightConfig) -> None:
    first_user, second_user = known_users(night, 2)
    body = {"entities": [{"id": first_user, "history": histories(night)[second_user]}]}

    fresh = (await app.post("/v1/lookup/user_topk", body | {"fresh": True}))["answers"][0]
    after = (await app.post("/v1/lookup/user_topk", body))["answers"][0]

    assert (fresh["source"], fresh["reason"]) == ("live", "fresh")
    assert (after["source"], after["producer"]) == ("l2", "batch")


async def test_excluded_items_and_the_sent_history_do_not_appear(app: Running, night: NightConfig) -> None:
    user = known_users(night, 1)[0]
    items = (await app.get(f"/v1/lookup/user_topk/{user}"))["items"]
    body = {"entities": [{"id": user, "history": items[:2]}], "exclude": items[2:4]}

    answer = (await app.post("/v1/lookup/user_topk", body))["answers"][0]
    full_answer = (await app.post("/v1/lookup/user_topk", body | {"k": K}))["answers"][0]
    used_up = (await app.post("/v1/lookup/user_topk", {"entities": [user], "exclude": items}))["answers"][0]

    assert answer["items"] == items[4:] and answer["short"]
    assert full_answer["items"] == items[4:] and full_answer["short"] and full_answer["producer"] == "batch"
    assert (used_up["items"], used_up["short"], used_up["producer"]) == ([], True, "batch")


async def test_scores_come_in_rank_order_and_name_what_cannot_be_scored(
    app: Running, night: NightConfig, generation: str
) -> None:
    user = known_users(night, 1)[0]
    top = await app.get(f"/v1/lookup/user_topk/{user}", k=30)
    candidates = [*reversed(top["items"]), "no-such-item"]

    stored_answer = await app.post("/v1/score", {"user": user, "items": candidates})
    live = await app.post("/v1/score", {"user": {"history": histories(night)[user]}, "items": candidates, "k": 3})
    unknown_user_answer = await app.post("/v1/score", {"user": "nobody", "items": candidates})

    assert stored_answer["unknown"] == ["no-such-item"] and stored_answer["source"] in ("l1", "l2")
    assert stored_answer["scores"] == sorted(stored_answer["scores"], reverse=True)
    exact = exact_order(night, generation, stored_answer["items"], top)
    assert exact > 0.99 and set(stored_answer["items"]) == set(top["items"])
    assert live["source"] == "live" and len(live["items"]) == 3
    assert (unknown_user_answer["items"], unknown_user_answer["source"]) == ([], "default")
    assert unknown_user_answer["unscored"] and unknown_user_answer["reason"] == "not_in_generation"


def exact_order(night: NightConfig, generation: str, ranked: list[str], top: dict[str, Any]) -> float:
    """Share of ranks on which the stored vector agrees with the night's exact scores."""
    manifest, root = open_generation(night.store(), generation)
    assert ItemTable.open(root, manifest).count == manifest.items.count
    scores = dict(zip(top["items"], top["scores"], strict=True))
    exact_scores = [scores[item_id] for item_id in ranked]
    in_order = [a >= b or abs(a - b) <= 2e-3 * abs(a) for a, b in itertools.pairwise(exact_scores)]
    return float(np.mean(in_order))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/lookup/nothing/x", None, 404, "unknown_table"),
        ("GET", "/v1/lookup/user_topk/x?k=0", None, 422, "invalid_k"),
        ("GET", f"/v1/lookup/user_topk/x?k={K + 1}", None, 422, "invalid_k"),
        ("GET", "/v1/lookup/user_topk/%FF", None, 422, "invalid_id"),
        ("GET", "/v1/lookup/user_topk/" + "x" * 257, None, 422, "invalid_id"),
        ("GET", "/v1/lookup/user_topk/x?generation=gone", None, 409, "generation_gone"),
        ("POST", "/v1/lookup/user_topk", {"entities": ["x"] * 1001}, 422, "batch_too_long"),
        ("POST", "/v1/lookup/user_topk", {"entities": [{"id": 1.5}]}, 422, "invalid_id"),
        ("POST", "/v1/lookup/user_topk", {"entities": [{"id": "x", "features": {"age": 3}}]}, 422, "invalid_input"),
        ("POST", "/v1/lookup", {"entities": [{"id": "x"}]}, 422, "missing_field"),
        ("POST", "/v1/score", {"user": "x", "items": ["a"] * 1001}, 422, "batch_too_long"),
        ("POST", "/v1/lookup/user_topk", {}, 422, "missing_field"),
        ("POST", "/v1/lookup", {}, 422, "missing_field"),
        ("POST", "/v1/score", {"user": "x"}, 422, "missing_field"),
        ("POST", "/v1/score", {"user": "x", "items": []}, 422, "batch_too_long"),
        ("POST", "/v1/explain/user_topk", {}, 422, "missing_field"),
        ("POST", "/v1/lookup/user_topk?k=2", {"entities": ["x"]}, 422, "unknown_field"),
        ("POST", "/v1/lookup?filter=cheap", {"entities": [{"id": "x", "table": "user_topk"}]}, 422, "unknown_field"),
        ("POST", "/v1/score?generation=gone", {"user": "x", "items": ["a"]}, 422, "unknown_field"),
        ("DELETE", "/v1/lookup/user_topk/x", None, 405, "method_not_allowed"),
        ("GET", "/v2", None, 404, "not_found"),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_refused_for_a_program_to_read(
    app: Running, method: str, path: str, body: dict[str, Any] | None, status: int, code: str
) -> None:
    response = await app.http.request(method, path, json=body)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code and response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/lookup", {"entities": [{"id": "x", "table": "user_topk"}]}),
        ("/v1/score", {"user": "x", "items": ["i-00001"]}),
        ("/v1/feedback", {"event": "click", "canary_key": "x"}),
        ("/v1/explain/user_topk", {"entities": ["x"]}),
        ("/v1/lookup/user_topk", {"entities": ["x"]}),
    ],
)
async def test_a_body_of_another_media_type_is_refused_by_its_type(app: Running, path: str, body: Any) -> None:
    arrow = "application/vnd.apache.arrow.stream"
    supported = ["application/json", *([arrow] if path == "/v1/lookup/user_topk" else [])]
    json_types = ("application/json; charset=utf-8", "application/vnd.shop+json", "application/x-www-form-urlencoded")
    for media_type in (None, *json_types):
        headers = {} if media_type is None else {"Content-Type": media_type}
        response = await app.http.post(path, content=orjson.dumps(body), headers=headers)
        assert response.status_code == 200, (media_type, response.text)
    for media_type in {"text/plain", "application/xml", arrow}.difference(supported):
        headers = {"Content-Type": media_type}
        response = await app.http.post(path, content=orjson.dumps(body), headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
        assert (error["field"], error["supported"]) == ("content-type", supported)


async def test_the_last_of_two_equal_names_counts_and_answers_are_for_no_cache(
    app: Running, night: NightConfig
) -> None:
    user = known_users(night, 1)[0]

    of_url = await app.http.get(f"/v1/lookup/user_topk/{user}?k=1&k=3")
    body = b'{"entities": ["nobody"], "entities": ["%b"], "k": 1, "k": 3}' % user.encode()
    of_body = await app.http.post("/v1/lookup/user_topk", content=body)

    (answer,) = of_body.json()["answers"]
    assert answer["id"] == user and len(answer["items"]) == len(of_url.json()["items"]) == 3
    for response in (of_url, of_body):
        assert not {"cache-control", "etag", "expires"} & response.headers.keys()


async def test_a_body_that_lies_about_its_length_is_stopped_while_it_streams(night: NightConfig) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal pulled
        while pulled < 10_000:
            pulled += 1
            yield b"x" * 1_000

    async with serving(night, body_bytes=50_000) as app:
        response = await app.http.post("/v1/lookup/user_topk", content=endless())
        honest = await app.http.post("/v1/lookup/user_topk", content=b" " * 50_001)

    assert response.status_code == honest.status_code == 413 and pulled < 100
    assert response.json()["error"]["code"] == "body_too_large"


async def test_the_dashboards_page_needs_no_token_and_is_no_part_of_the_api(night: NightConfig) -> None:
    async with serving(night, token="secret") as app:
        page, script = await app.http.get("/dashboard"), await app.http.get("/dashboard/main.js")
        head, missing_file_response = (await app.http.head("/dashboard"), await app.http.get("/dashboard/other.js"))
        described = (await app.http.get("/openapi.json")).json()

    assert [response.status_code for response in (page, script, head, missing_file_response)] == [200, 200, 200, 404]
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert not [path for path in described["paths"] if path in ("/dashboard", "/dashboard/main.js")]


async def test_a_token_guards_predictions_and_not_the_probes(night: NightConfig) -> None:
    async with serving(night, token="secret") as app:
        assert (await app.http.get("/v1/lookup/user_topk/x")).status_code == 401
        assert (await app.http.get("/v1/generations")).status_code == 401
        wrong = {"Authorization": "Bearer secre"}
        assert (await app.http.get("/v1/generations", headers=wrong)).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert (await app.http.get("/v1/lookup/user_topk/x", headers=right)).status_code == 200
        for probe in ("/healthz", "/readyz", "/metrics"):
            assert (await app.http.get(probe)).status_code == 200


async def test_sources_sum_to_the_entities_asked_and_misses_to_the_rest(app: Running, night: NightConfig) -> None:
    users = known_users(night, 20)
    history = histories(night)[users[0]]

    for _ in range(2):
        await app.post("/v1/lookup/user_topk", {"entities": [*users, "nobody", "nobody"]})
        await app.post("/v1/lookup/user_topk", {"entities": [{"id": "new", "history": history}] * 5})
        await app.http.post("/v1/lookup/user_topk", json={"entities": [""]})

    answers, misses = (
        await app.scrape_samples("larder_answers_total"),
        await app.scrape_samples("larder_misses_total"),
    )
    total = 2 * (22 + 5)
    assert sum(answers.values()) == total
    assert sum((await app.scrape_samples("larder_entities_total")).values()) == total
    stored_count = sum(value for (source, _), value in answers.items() if source in ("l1", "l2"))
    assert sum(misses.values()) == total - stored_count
    seconds = await app.scrape_samples("larder_answer_seconds_count")
    assert sum(seconds.values()) == total


async def test_the_probes_and_the_overview_describe_the_replica(app: Running, generation: str) -> None:
    ready = await app.get("/readyz")
    overview = await app.get("/v1/generations")
    info = await app.scrape_samples("larder_generation_info")

    assert await app.get("/healthz") == {"status": "ok"}
    assert ready["ready"] and ready["generation"] == generation and ready["stale"] is None
    assert overview["live"]["generation"] == generation and overview["previous"] is None
    assert overview["live"]["tables"]["user_topk"]["width"] == K
    model = overview["live"]["models"]["user_tower"]
    assert model["precision"] == "int8" and 0 < model["int8_bytes"] < model["fp32_bytes"]
    assert model["agreement"]["speedup_single"] > 0 < model["agreement"]["speedup_batch_32"]
    assert info[generation, "live"] == 1


async def test_openapi_documents_what_is_parsed_by_hand(app: Running) -> None:
    paths = (await app.get("/openapi.json"))["paths"]

    lookup = paths["/v1/lookup/{table}"]["post"]
    assert "entities" in str(lookup["requestBody"]) and {"408", "413"} <= lookup["responses"].keys()
    parameters = paths["/v1/lookup/{table}/{entity}"]["get"]["parameters"]
    assert {parameter["name"] for parameter in parameters} >= {"table", "entity", "k", "fresh", "generation"}
    assert "/v1/score" in paths


@pytest.mark.parametrize("id_", ["007", "a/b", "..", "../x", "50% + ü", "?k=1#x", "x" * 256])
async def test_the_client_gets_back_the_very_id_it_asked_for(night: NightConfig, id_: str) -> None:
    async with serving(night) as app:
        transport = httpx.ASGITransport(app.http._transport.app)  # type: ignore[attr-defined]
        async with AsyncClient(BASE, transport=transport) as client:
            by_url = await client.lookup("user_topk", id_, Options(k=3))
            by_body = (await client.lookup_many("user_topk", [id_]))[0]
            with pytest.raises(InvalidRequest) as refused:
                await client.lookup("user_topk", id_, Options(k=0))

    assert by_url.id == by_body.id == id_ and by_url.source == "default"
    assert by_url.items is not None and len(by_url.items) == 3
    assert (refused.value.status, refused.value.code, refused.value.field) == (422, "invalid_k", "k")


async def test_connections_to_redis_are_open_before_it_is_ready(
    night: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[PipelinePool] = []
    make = PipelinePool.__init__

    def init_and_note(pool: PipelinePool, *arguments: Any, **options: Any) -> None:
        make(pool, *arguments, **options)
        pools.append(pool)

    monkeypatch.setattr(PipelinePool, "__init__", init_and_note)

    async with serving(night):
        assert [pool.opened for pool in pools] == [1]


async def test_items_similar_to_an_unknown_item_are_an_empty_list_with_a_reason(app: Running) -> None:
    """Popular items are like no item; a stranger among the users gets them."""
    similar = await app.get("/v1/lookup/item_similar/no-such-item")
    stranger = await app.get("/v1/lookup/user_topk/no-such-user")

    assert (similar["source"], similar["reason"]) == ("default", "not_in_generation")
    assert (similar["items"], similar["scores"]) == ([], [])
    assert stranger["source"] == "default" and stranger["items"]
