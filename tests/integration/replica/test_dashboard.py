"""The dashboard's document: all workers and replicas as one whole, equal to what they tell Prometheus."""

import asyncio
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from cache.process.redis_server import RedisServer
from precompute.config.settings import NightConfig
from serving.dashboard.counters import BIN_S
from tests.integration.fault_proxy import Fault, FaultProxy
from tests.integration.fleet import fleet
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started
from tests.integration.serving_app import Running, eventually, serving
from tests.openapi_document import resolved
from tests.polling import poll_until

SOURCES = ("l1", "l2", "live", "previous", "default")


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=100, items=60)


def sum_metrics(*texts: str) -> dict[str, Any]:
    """Totals of what several `/metrics` say."""
    answers, misses, totals = Counter[str](), Counter[str](), Counter[str]()
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                n = int(sample.value) if sample.name.endswith("_total") else 0
                match sample.name:
                    case "larder_answers_total":
                        answers[sample.labels["source"]] += n
                    case "larder_misses_total":
                        misses[sample.labels["reason"]] += n
                    case "larder_entities_total":
                        totals["entities"] += n
                    case "larder_requests_total":
                        totals["requests"] += n
    return {
        "requests": totals["requests"], "entities": totals["entities"],
        "answers": {source: answers[source] for source in SOURCES}, "misses": dict(misses),
    }  # fmt: skip


def send_lookups(url: str, users: list[str]) -> None:
    """Plain lookups, one unknown id, one batch and one request that is refused, each on a connection of its own."""
    for user in users:
        assert httpx.get(f"{url}/v1/lookup/user_topk/{user}").status_code == 200
    assert httpx.get(f"{url}/v1/lookup/user_topk/nobody").status_code == 200
    assert httpx.get(f"{url}/v1/lookup/no_such_table/u").status_code == 404
    body = {"entities": users[:7]}
    assert httpx.post(f"{url}/v1/lookup/user_topk", json=body).status_code == 200


@pytest.mark.slow
def test_two_replicas_and_two_workers_are_shown_as_one_whole_that_equals_metrics(
    night: NightConfig, tmp_path: Path
) -> None:
    users = sorted(histories(night))[:30]
    two_workers = environment(night, tmp_path / "state", REDIS_URL=str(night.redis_url), LARDER_WORKERS="2")
    with (
        fleet(night, tmp_path / "fleet", count=1, LARDER_DASHBOARD_S="0.2") as (alone,),
        started(two_workers | {"LARDER_DASHBOARD_S": "0.2"}) as (_, pair),
    ):
        urls = [alone.url, pair]
        for url in urls:
            send_lookups(url, users)
        expected = sum_metrics(*(httpx.get(f"{url}/metrics").text for url in urls))

        def fetch_dashboard(url: str) -> dict[str, Any]:
            document: dict[str, Any] = httpx.get(f"{url}/dashboard/data").json()
            return document

        def is_whole(url: str) -> bool:
            body = fetch_dashboard(url)
            return bool(body["whole"] and body["totals"] == expected and len(body["replicas"]) == 2)

        for url in urls:
            assert poll_until(functools.partial(is_whole, url)), (fetch_dashboard(url)["totals"], expected)
        body = fetch_dashboard(pair)
        assert sorted(replica["workers"] for replica in body["replicas"]) == [1, 2]
        assert {replica["generation"] for replica in body["replicas"]} == {body["generations"][0]["generation"]}
        assert all(replica["ready"] for replica in body["replicas"])
        assert sum(body["breakers"].values()) == 3 == body["breakers"]["closed"]
        assert sum(expected["answers"].values()) == expected["entities"] == 2 * (30 + 1 + 7)
        assert body["redis"]["used_bytes"] > 0 and body["l1"]["entries"] > 0

        def drawn() -> bool:
            series = fetch_dashboard(urls[0])["series"]
            return bool(sum(series["requests"]) == expected["requests"])

        assert poll_until(drawn, 3 * BIN_S)
        series = fetch_dashboard(urls[1])["series"]
        assert {source: sum(series["answers"][source]) for source in SOURCES} == expected["answers"]
        assert {reason: sum(n) for reason, n in series["misses"].items()} == expected["misses"]
        assert any(p99 for p99 in series["seconds"]["l2"]["p99"])
        assert sum(series["stages"]["parse"]) > 0
        assert set(map(len, (series["at"], *series["answers"].values()))) == {len(series["at"])}


async def test_a_worker_that_ends_takes_its_counts_along_as_it_does_from_metrics(night: NightConfig) -> None:
    async with serving(night, dashboard_s=0.1) as stays:
        async with serving(night, dashboard_s=0.1) as ends:
            await ends.get("/v1/lookup/user_topk/nobody")

            async def is_seen() -> bool:
                return bool((await data(stays))["totals"]["entities"] == 1)

            assert await eventually(is_seen)

        async def is_gone() -> bool:
            return bool((await data(stays))["totals"]["entities"] == 0)

        assert await eventually(is_gone)
        assert len((await data(stays))["replicas"]) == 1


async def data(app: Running) -> dict[str, Any]:
    return await app.get("/dashboard/data")


@pytest.mark.parametrize("fault", ["gone", "silent"])
async def test_without_redis_a_worker_shows_its_own_and_with_it_the_whole_again(
    tmp_path: Path, own_redis: RedisServer, fault: Fault
) -> None:
    night = build_night(tmp_path / "night", own_redis.url, users=50, items=40)
    async with (
        FaultProxy(own_redis.url) as proxy,
        serving(night, dashboard_s=0.1, redis_url=proxy.url) as cut_off,
        serving(night, dashboard_s=0.1) as connected_app,
    ):
        await cut_off.get("/v1/lookup/user_topk/nobody")
        await connected_app.get("/v1/lookup/user_topk/nobody")

        async def is_whole(app: Running, entities: int) -> bool:
            body = await data(app)
            entity_counts = body["totals"]["entities"], sum(body["lately"]["answers"].values())
            return bool(body["whole"]) and entity_counts == (entities, entities)

        assert await eventually(lambda: is_whole(cut_off, 2))
        proxy.set(fault)

        async def is_alone() -> bool:
            return not (await data(cut_off))["whole"]

        assert await eventually(is_alone)
        await cut_off.get("/v1/lookup/user_topk/somebody")

        async def is_counted() -> bool:
            return bool((await data(cut_off))["totals"]["entities"] == 2)

        assert await eventually(is_counted)
        body = await data(cut_off)
        assert body["verdict"]["level"] == "bad" and "Redis" in body["verdict"]["sentence"]
        assert body["redis"]["used_bytes"] is None and body["generations"][0]["state"] == "live"
        with redis.Redis.from_url(own_redis.url) as client:  # what comes back is empty
            await asyncio.to_thread(client.flushall)
        proxy.set("none")

        # Both have reported their bins once more.
        assert await eventually(lambda: is_whole(cut_off, 3), 20)
        assert await eventually(lambda: is_whole(connected_app, 3), 20)


async def test_generations_and_the_night_are_reported_with_state_gates_size_and_times(night: NightConfig) -> None:
    async with serving(night, quality_per_mille=0.0) as app:
        body = await data(app)

    (generation,) = body["generations"]
    assert (generation["state"], generation["role"]) == ("live", "live")
    users, items = len(histories(night)), 60
    assert generation["records"] == 3 * users + 2 * items
    assert generation["bytes"] > 1_000 and generation["epoch"] > 0
    assert {gate["verdict"] for gate in generation["gates"]} == {"passed"}
    (last,) = body["nights"]
    assert last["generation"] == generation["generation"] and last["outcome"] == "published"
    assert [step["step"] for step in last["steps"]] == [
        "begin", "embed_items", "score", "assemble", "index", "quantize", "load", "verify",
        "publish", "warm",
    ]  # fmt: skip
    assert 0 < last["began_at"] <= generation["published_at"]
    assert body["advisor"] is None and body["quality"] is None


async def test_the_data_are_guarded_not_counted_and_can_be_switched_off(night: NightConfig) -> None:
    async with serving(night, token="secret") as app:
        refused = await app.http.get("/dashboard/data")
        answered = await app.http.get("/dashboard/data", headers={"Authorization": "Bearer secret"})
        document = (await app.http.get("/openapi.json")).json()
        request_counts = await app.scrape_samples("larder_requests_total")
    async with serving(night, dashboard_s=0.0) as app:
        off = await app.http.get("/dashboard/data")

    assert (refused.status_code, answered.status_code, off.status_code) == (401, 200, 404)
    assert off.json()["error"]["code"] == "dashboard_off"
    assert answered.headers["cache-control"] == "no-store" and len(answered.content) < 1 << 20
    described = document["paths"]["/dashboard/data"]["get"]["responses"]["200"]["content"]
    properties = resolved(document, described["application/json"]["schema"])["properties"]
    assert set(answered.json()) == set(properties)
    assert request_counts == {}
