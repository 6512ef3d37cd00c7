"""Publishing, rolling back and blocking under a running service; Redis slow, gone and lost."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from cache.process.redis_server import RedisServer
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.blocklist import change_blocklist
from precompute.config.settings import NightConfig
from precompute.releases.recovery import restore
from precompute.steps import verify
from tests.integration.nights import (
    NEXT,
    build_night,
    build_verified,
    histories,
    publish,
    publish_night,
    roll_back,
    top_lists,
)
from tests.integration.serving_app import Running, eventually, serving
from tests.openapi_document import resolved


@pytest.fixture
def night(tmp_path: Path, own_redis: RedisServer) -> NightConfig:
    return build_night(tmp_path / "night", own_redis.url)


@pytest.fixture
async def app(night: NightConfig) -> AsyncIterator[Running]:
    async with serving(night) as running:
        yield running


def control(night: NightConfig) -> "redis.Redis":
    assert night.redis_url is not None
    return redis.Redis.from_url(night.redis_url, protocol=2)


async def follows(app: Running, generation: str) -> bool:
    async def is_following() -> bool:
        return bool((await app.get("/readyz"))["generation"] == generation)

    return await eventually(is_following)


@pytest.mark.slow
async def test_publishes_and_rollbacks_under_traffic_mix_nothing_and_lose_nothing(
    app: Running, night: NightConfig
) -> None:
    first = (await app.get("/readyz"))["generation"]
    second = await asyncio.to_thread(build_verified, night, NEXT)
    users = sorted(histories(night))[:30]
    expected = {generation: top_lists(night, generation, users) for generation in (first, second)}
    history = histories(night)[users[0]]
    entity_count, answering_generations, stop = 0, set(), asyncio.Event()

    async def traffic(number: int) -> None:
        nonlocal entity_count
        while not stop.is_set():
            entities = [*users, {"id": f"new-{number}", "history": history}, "nobody"]
            body = await app.post("/v1/lookup/user_topk", {"entities": entities})
            entity_count += len(entities)
            assert len({answer["generation"] for answer in body["answers"]}) == 1
            for answer in body["answers"][: len(users)]:
                assert tuple(answer["items"]) == expected[answer["generation"]][answer["id"]]
                answering_generations.add(answer["generation"])
            await asyncio.sleep(0.001)

    running = [asyncio.create_task(traffic(number)) for number in range(3)]
    for _ in range(3):
        await asyncio.to_thread(publish, night, second)
        assert await follows(app, second)
        assert await asyncio.to_thread(roll_back, night) == first
        assert await follows(app, first)
        # From here on no answer comes from the generation that was rolled back.
        late = await app.post("/v1/lookup/user_topk", {"entities": [*users, "nobody"]})
        assert {answer["generation"] for answer in late["answers"]} == {first}
        entity_count += len(users) + 1
        assert (await app.get("/v1/generations"))["previous"] is None
        await asyncio.to_thread(verify.run, night, {"generation": second})
    stop.set()
    await asyncio.gather(*running)

    assert answering_generations == {first, second}
    assert sum((await app.scrape_samples("larder_answers_total")).values()) == entity_count


async def test_a_request_that_began_before_the_swap_ends_on_its_own_generation(
    app: Running, night: NightConfig
) -> None:
    first = (await app.get("/readyz"))["generation"]
    user = min(histories(night))
    captured = app.service.capture_served()

    second = await asyncio.to_thread(publish_night, night, NEXT)
    assert await follows(app, second)

    assert captured.live.generation == first and app.service.capture_served().live.generation == second
    pinned = await app.get(f"/v1/lookup/user_topk/{user}", generation=first)
    assert (pinned["generation"], pinned["source"]) == (first, "l2")


async def test_what_callers_asked_most_is_in_l1_before_the_swap(app: Running, night: NightConfig) -> None:
    users = sorted(histories(night))[:20]
    await app.post("/v1/lookup/user_topk", {"entities": users})

    second = await asyncio.to_thread(publish_night, night, NEXT)
    assert await follows(app, second)
    answers = (await app.post("/v1/lookup/user_topk", {"entities": users}))["answers"]

    # The flip causes no stampede on Redis.
    assert {(answer["source"], answer["generation"]) for answer in answers} == {("l1", second)}


async def test_the_heartbeat_names_what_is_held(app: Running, night: NightConfig) -> None:
    first = (await app.get("/readyz"))["generation"]
    second = await asyncio.to_thread(publish_night, night, NEXT)

    async def has_both_generations() -> bool:
        from cache.control.control_keys import Control

        replicas = await asyncio.to_thread(Control(control(night), night.keyspace()).replicas)
        return [(replica.served_generation, replica.held_generations) for replica in replicas] == [
            (second, (second, first))
        ]

    assert await eventually(has_both_generations)


async def test_a_block_is_effective_everywhere_within_seconds(app: Running, night: NightConfig) -> None:
    user, blocked_user = sorted(histories(night))[:2]
    items = (await app.get(f"/v1/lookup/user_topk/{user}"))["items"]
    popular = (await app.get("/v1/lookup/user_topk/nobody", k=3))["items"]
    change_blocklist(
        night.store(), block_items=[items[0].encode(), popular[0].encode()], block_entities=[blocked_user.encode()]
    )

    async def is_item_blocked() -> bool:
        return bool(items[0] not in (await app.get(f"/v1/lookup/user_topk/{user}"))["items"])

    assert await eventually(is_item_blocked, timeout_s=5)
    blocked = {items[0], popular[0]}
    new = {"entities": [{"id": "new", "history": histories(night)[user]}]}
    live = (await app.post("/v1/lookup/user_topk", new))["answers"][0]
    default = await app.get("/v1/lookup/user_topk/nobody", k=3)
    refused = await app.get(f"/v1/lookup/user_topk/{blocked_user}")
    vector = await app.get(f"/v1/lookup/user_vector/{blocked_user}")
    scores = await app.post("/v1/score", {"user": user, "items": items[:3]})
    assert (live["source"], default["source"], refused["source"]) == ("live", "default", "default")
    assert not blocked & {*live["items"], *default["items"], *refused["items"]}
    assert len(default["items"]) == 3 and items[0] in scores["blocked"]
    assert refused["reason"] == vector["reason"] == "entity_blocked" and vector["vector"] is None


async def test_a_redis_that_loses_everything_is_survived_and_restored(app: Running, night: NightConfig) -> None:
    users = sorted(histories(night))[:5]
    await app.post("/v1/lookup/user_topk", {"entities": users[:2]})
    history = histories(night)[users[0]]
    control(night).flushall()

    async def marked() -> bool:
        return bool((await app.get("/readyz"))["stale"] == "pointer_vanished")

    assert await eventually(marked)
    entities = [*users[:2], {"id": users[2], "history": history}, users[3]]
    answers_without_redis = (await app.post("/v1/lookup/user_topk", {"entities": entities}))["answers"]
    assert [answer["source"] for answer in answers_without_redis] == ["l1", "l1", "live", "default"]
    assert [answer.get("reason") for answer in answers_without_redis[2:]] == ["page_missing"] * 2
    assert {answer["stale"] for answer in answers_without_redis} == {"pointer_vanished"}
    epoch = (await app.get("/readyz"))["epoch"]

    await asyncio.to_thread(restore, night)

    async def followed() -> bool:
        body = await app.get("/readyz")
        return bool(body["epoch"] > epoch and body["stale"] is None)

    assert await eventually(followed)
    back = (await app.post("/v1/lookup/user_topk", {"entities": users}))["answers"]
    assert {answer["source"] for answer in back} <= {"l1", "l2"}
    assert back[3]["source"] == "l2" and all("stale" not in answer for answer in back)


async def test_a_redis_that_hangs_costs_a_deadline_and_then_nothing(night: NightConfig) -> None:
    users = sorted(histories(night))
    async with serving(night, l2_deadline_ms=50.0, breaker_cooldown_s=30.0) as app:
        loop = asyncio.get_running_loop()
        control(night).client_pause(1_500)
        slow, answers = [], []
        for user in users[:8]:
            started = loop.time()
            answers.append(await app.get(f"/v1/lookup/user_topk/{user}", k=3))
            slow.append(loop.time() - started)

        # First, waits are bounded; then the breaker avoids even those. No request is refused.
        assert {answer["source"] for answer in answers} == {"default"}
        assert max(slow) < 1.0 and min(slow[-2:]) < 0.05
        assert {answer["reason"] for answer in answers} == {"l2_timeout", "breaker_open"}


async def test_without_redis_a_replica_starts_from_the_newest_release(night: NightConfig) -> None:
    user = min(histories(night))
    new = {"entities": [{"id": "new", "history": histories(night)[user]}]}
    async with serving(night, redis_url="redis://127.0.0.1:1/0") as app:
        ready = await app.get("/readyz")
        known_user_answer = await app.get(f"/v1/lookup/user_topk/{user}")
        live = (await app.post("/v1/lookup/user_topk", new))["answers"][0]

    assert ready["ready"] and ready["stale"] == "redis_unreachable"
    assert (known_user_answer["source"], known_user_answer["stale"]) == ("default", "redis_unreachable")
    assert known_user_answer["reason"] in ("l2_down", "breaker_open") and live["source"] == "live"


async def test_before_anything_is_published_the_service_says_so(tmp_path: Path, own_redis: RedisServer) -> None:
    from tests.integration.nights import prepare

    night = prepare(tmp_path / "night", own_redis.url)
    async with serving(night) as app:
        assert (await app.http.get("/healthz")).status_code == 200
        assert (await app.http.get("/readyz")).status_code == 503
        refused = await app.http.get("/v1/lookup/user_topk/x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")

        generation = await asyncio.to_thread(publish_night, night, NEXT)

        async def ready() -> bool:
            return (await app.http.get("/readyz")).status_code == 200

        assert await eventually(ready)
        assert (await app.get("/v1/lookup/user_topk/x", k=1))["generation"] == generation


def damage(night: NightConfig, generation: str, path: str) -> None:
    """Turns one byte of a file of a generation over."""
    file = night.path(night.artifacts) / night.namespace / "generations" / generation / path
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    file.unlink()
    file.write_bytes(raw)


@pytest.mark.parametrize("damaged_part", ["index", "model"])
async def test_a_damaged_model_or_index_leaves_the_pages_answering(night: NightConfig, damaged_part: str) -> None:
    user = min(histories(night))
    async with serving(night) as app:
        generation = (await app.get("/readyz"))["generation"]
    manifest = read_manifest(night.store(), generation)
    model = manifest.models["user_tower"]
    index = next(iter(manifest.indexes.values()))
    file = index.file if damaged_part == "index" else model.int8 or model.fp32
    damage(night, generation, file.path)

    async with serving(night) as app:
        ready = await app.get("/readyz")
        degraded = (await app.get("/v1/generations"))["degraded"]
        known_user_answer = await app.get(f"/v1/lookup/user_topk/{user}")
        new = {"entities": [{"id": "new", "history": histories(night)[user]}]}
        live = (await app.post("/v1/lookup/user_topk", new))["answers"][0]

    assert ready["ready"] and file.path in degraded and ready["stale"] is None
    assert ready["degraded"] == "no_model"
    assert known_user_answer["source"] == "l2"
    assert live["source"] == "default" and live["live"] == "no_model"


async def test_a_damaged_newest_generation_leaves_the_previous_answering_at_a_restart(night: NightConfig) -> None:
    user = min(histories(night))
    async with serving(night) as app:
        first = (await app.get("/readyz"))["generation"]
    second = await asyncio.to_thread(publish_night, night, NEXT)
    file = read_manifest(night.store(), second).items.ids.path
    damage(night, second, file)

    async with serving(night) as app:
        ready = await app.http.get("/readyz")
        generations_body = await app.get("/v1/generations")
        answer = await app.get(f"/v1/lookup/user_topk/{user}")

    # The details of the error name files of the store, so only callers with a token get them.
    assert (ready.status_code, ready.json()["failed"]) == (503, f"generation {second} cannot be loaded")
    assert (
        generations_body["failed"].startswith(f"generation {second} cannot be loaded: ")
        and file in generations_body["failed"]
    )
    assert (answer["generation"], answer["source"]) == (first, "l2")
    assert answer["stale"] == "load_failed"


async def test_the_store_is_read_in_threads_of_its_own(night: NightConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads_by_method: dict[str, set[str]] = {}

    def wrap_method(name: str) -> Callable[..., Any]:
        undisturbed = getattr(ArtefactStore, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            threads_by_method.setdefault(name, set()).add(threading.current_thread().name)
            return undisturbed(*args, **kwargs)

        return method

    user = min(histories(night))
    for name in ("read", "read_many", "names", "fetch", "sweep_host_copies", "sweep_unfinished"):
        monkeypatch.setattr(ArtefactStore, name, wrap_method(name))
    with ThreadPoolExecutor(1, "night") as apart:
        async with serving(night) as app:
            await app.get(f"/v1/explain/user_topk/{user}")
            await app.get("/dashboard/data")
            second = await asyncio.get_running_loop().run_in_executor(apart, publish_night, night, NEXT)
            assert await follows(app, second)

    assert {"read", "fetch", "names"} <= threads_by_method.keys()
    # The night, which publishes in this process, has its own threads. A store that hangs must block neither the loop
    # nor asyncio's threads, in which all other work runs.
    threads = {thread_name for names in threads_by_method.values() for thread_name in names}
    assert any(thread_name.startswith("larder-store") for thread_name in threads)
    assert not any(thread_name.startswith(("MainThread", "asyncio")) for thread_name in threads), threads_by_method


async def test_a_damaged_newest_blocklist_unblocks_nothing_at_a_restart(night: NightConfig) -> None:
    user = min(histories(night))
    async with serving(night) as app:
        item = (await app.get(f"/v1/lookup/user_topk/{user}"))["items"][0]
    change_blocklist(night.store(), block_items=[item.encode()])
    night.store().write("blocklist/000000000002.json", b'{"version": 2, "items": [')

    async with serving(night) as app:
        ready = await app.get("/readyz")
        answer = await app.get(f"/v1/lookup/user_topk/{user}")

    assert ready["ready"] and ready["stale"] == answer["stale"] == "blocklist_unreadable"
    assert item not in answer["items"]


async def test_a_closed_service_leaves_no_task_behind(night: NightConfig) -> None:
    tasks_before = asyncio.all_tasks()

    for _ in range(3):
        async with serving(night) as app:
            await app.get("/v1/lookup/user_topk/nobody")

    assert asyncio.all_tasks() == tasks_before


@pytest.mark.parametrize("token", ["secret", "gehëim", "秘密"])
async def test_a_token_of_any_letters_lets_in_who_has_it(night: NightConfig, token: str) -> None:
    async with serving(night, token=token) as app:
        statuses = {
            authorization: (
                await app.http.get("/v1/generations", headers=[(b"authorization", authorization)])
            ).status_code
            for authorization in (f"Bearer {token}".encode(), f"Bearer {token}x".encode(), b"Bearer ", b"")
        }
        document = await app.get("/openapi.json")

    assert list(statuses.values()) == [200, 401, 401, 401]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["paths"]["/v1/score"]["post"]["security"] == [{"bearer": ["score"]}]
    assert "security" not in document["paths"]["/readyz"]["get"]


async def test_openapi_promises_what_the_service_keeps(night: NightConfig) -> None:
    async with serving(night, max_batch=3, max_history=4, max_exclude=5) as app:
        document = await app.get("/openapi.json")
        paths = document["paths"]
        generations = await app.get("/v1/generations")

    def body(path: str) -> dict[str, Any]:
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        properties: dict[str, Any] = resolved(document, content["schema"])["properties"]
        return properties

    entities = body("/v1/lookup")["entities"]
    entity = resolved(document, entities["items"])
    assert entities["maxItems"] == 3 and entity["additionalProperties"] is False
    assert entity["properties"]["history"]["anyOf"][0]["maxItems"] == 4
    assert body("/v1/lookup/{table}")["exclude"]["anyOf"][0]["maxItems"] == 5
    user = resolved(document, body("/v1/score")["user"])["oneOf"][1]
    assert resolved(document, user)["additionalProperties"] is False
    headers = [parameter["name"] for parameter in paths["/v1/score"]["post"]["parameters"]]
    assert (
        headers == ["X-Deadline-Ms", "X-Larder-Canary-Key", "X-Larder-Arm"]
        and "503" in paths["/readyz"]["get"]["responses"]
    )
    generations_content = paths["/v1/generations"]["get"]["responses"]["200"]["content"]["application/json"]
    documented_fields = resolved(document, generations_content["schema"])["properties"]
    assert set(documented_fields) == set(generations)
    assert set(resolved(document, documented_fields["live"])["properties"]) == set(generations["live"])
    assert "securitySchemes" not in document["components"]
