"""The service says when a generation is missing: after a night that ran, one that did not, and before any ever ran."""

import dataclasses
import time
from pathlib import Path

from cache.store.artefacts import generation_path, read_manifest
from precompute.config.settings import NightConfig
from tests.integration.nights import build_night
from tests.integration.serving_app import Running, serving

MISSING, DUE = "larder_generation_missing", "larder_generation_due_timestamp_seconds"


async def gauge(app: Running, name: str) -> float:
    (value,) = (await app.scrape_samples(name)).values()
    return value


async def test_where_no_night_ever_ran_the_generation_is_missing_though_no_alarm_was_raised(
    tmp_path: Path, redis_url: str
) -> None:
    config = NightConfig(namespace=tmp_path.name, redis_url=redis_url, base=str(tmp_path))
    async with serving(config) as app:
        response = await app.http.get("/readyz")

        body = response.json()
        assert response.status_code == 503 and body["generation"] is None
        assert body["schedule"]["missing"] and body["schedule"]["age_seconds"] is None
        assert await gauge(app, MISSING) == 1.0


async def test_a_night_that_ran_is_there_and_one_that_did_not_is_missed_without_unreadiness(
    tmp_path: Path, redis_url: str
) -> None:
    night = build_night(tmp_path, redis_url, users=60, items=60)
    # A night is due at noon at the latest, whenever and in whichever time zone this runs.
    plan = {"schedule": "0 0,12 * * *", "timezone": "Europe/Berlin", "schedule_grace_s": 0.0}
    async with serving(night, **plan) as app:
        body = await app.get("/readyz")
        generation = body["generation"]

        assert body["ready"] and not body["schedule"]["missing"]
        assert body["schedule"]["due"].endswith(("23:00:00Z", "22:00:00Z", "11:00:00Z", "10:00:00Z"))
        assert await gauge(app, MISSING) == 0.0
        assert 0 <= time.time() - await gauge(app, DUE) <= 12 * 3_600
        age_s = await gauge(app, "larder_generation_age_seconds")
        assert abs(age_s - body["schedule"]["age_seconds"]) < 60

    store = night.store()
    old = dataclasses.replace(read_manifest(store, generation), created_at=int(time.time()) - 13 * 3_600)
    store.write(generation_path(generation, "manifest.json"), old.to_bytes())
    async with serving(night, **plan) as app:
        body = await app.get("/readyz")

        assert body["ready"] and body["schedule"]["missing"]
        assert await gauge(app, MISSING) == 1.0
