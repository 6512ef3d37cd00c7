"""What replicas notice of a store that was changed under them, as the dashboard and `/metrics` say it."""

import asyncio
import dataclasses
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.process.redis_server import RedisServer
from cache.store.artefacts import generation_path, read_manifest
from precompute.cli.status import read_state, report_status
from precompute.config.settings import NightConfig
from precompute.traffic.canary import trial
from serving.generations import store_watch
from tests.integration.nights import NEXT, build_night, build_verified
from tests.integration.serving_app import Running, eventually, serving

PROMPT: dict[str, Any] = {"dashboard_s": 0.1, "figures_s": 0.1}


@pytest.fixture
def night(tmp_path: Path, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> NightConfig:
    monkeypatch.setattr(store_watch, "FILES_INTERVAL_S", 0.1)
    return build_night(tmp_path / "night", own_redis.url, users=50, items=40)


def store_folder(night: NightConfig) -> Path:
    return night.store().local("")


def put_back(night: NightConfig, copy_folder: Path) -> None:
    """Replace the store by a copy of it."""
    shutil.rmtree(store_folder(night))
    shutil.copytree(copy_folder, store_folder(night))


async def verdict_of(app: Running) -> dict[str, Any]:
    verdict: dict[str, Any] = (await app.get("/dashboard/data"))["verdict"]
    return verdict


def is_well(app: Running) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        gauge = await app.scrape_samples("larder_store_problem")
        return (await verdict_of(app))["level"] == "ok" and set(gauge.values()) == {0.0}

    return condition


def tells(app: Running, words: str) -> Callable[[], Awaitable[bool]]:
    """Condition: the verdict's first sentence has these words and a remedy, and the gauge is set."""

    async def condition() -> bool:
        verdict, gauge = await verdict_of(app), await app.scrape_samples("larder_store_problem")
        is_told = verdict["level"] == "bad" and words in verdict["sentence"] and "larder check" in verdict["advice"]
        return is_told and set(gauge.values()) == {1.0}

    return condition


async def test_an_older_copy_under_the_service_is_told_until_the_newer_store_is_back(
    night: NightConfig, tmp_path: Path
) -> None:
    shutil.copytree(store_folder(night), tmp_path / "older")
    build_night(tmp_path / "night", str(night.redis_url), users=50, items=40, data_until=NEXT)
    shutil.copytree(store_folder(night), tmp_path / "newest")
    async with serving(night, **PROMPT) as app:
        assert await eventually(is_well(app)), await verdict_of(app)

        await asyncio.to_thread(put_back, night, tmp_path / "older")

        assert await eventually(tells(app, "that no release record explains")), await verdict_of(app)
        # `larder status` looks at the store itself: heartbeats do not say it a second time
        problems = (await asyncio.to_thread(lambda: report_status(night, read_state(night))))["problems"]
        assert len([problem for problem in problems if "no release record explains" in problem]) == 1

        await asyncio.to_thread(put_back, night, tmp_path / "newest")
        assert await eventually(is_well(app)), await verdict_of(app)


def lose_file(night: NightConfig, generation: str) -> None:
    lost_path = read_manifest(night.store(), generation).served_artefacts()[0].path
    (store_folder(night) / generation_path(generation, lost_path)).unlink()


def lose_folder(night: NightConfig, generation: str) -> None:
    shutil.rmtree(store_folder(night) / generation_path(generation))


def lose_record(night: NightConfig, _generation: str) -> None:
    (store_folder(night) / "releases/1.json").unlink()


def damage_record(night: NightConfig, _generation: str) -> None:
    """Damage a record that the replica has read already."""
    (store_folder(night) / "releases/1.json").write_bytes(b"no record")


def change_manifest(night: NightConfig, generation: str) -> None:
    manifest = dataclasses.replace(read_manifest(night.store(), generation), created_at=1)
    night.store().write(generation_path(generation, "manifest.json"), manifest.to_bytes())


def write_newer_format(night: NightConfig, generation: str) -> None:
    path = store_folder(night) / generation_path(generation, "manifest.json")
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"format": 1_000}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_file, "lacks 1 of the files of"),
        (lose_folder, "(manifest.json), which is live"),
        (lose_record, "has no release record: is it mounted?"),
        (damage_record, "releases/1.json in"),
        (change_manifest, "but its release record has"),
        (write_newer_format, "is live: a replica that starts cannot load it"),
    ],
)
async def test_what_the_store_loses_of_the_live_generation_is_told_until_it_is_put_back(
    night: NightConfig, tmp_path: Path, damage: Callable[[NightConfig, str], None], words: str
) -> None:
    shutil.copytree(store_folder(night), tmp_path / "copy")
    async with serving(night, **PROMPT) as app:
        assert await eventually(is_well(app)), await verdict_of(app)
        generation = (await app.get("/dashboard/data"))["replicas"][0]["generation"]

        await asyncio.to_thread(damage, night, generation)

        assert await eventually(tells(app, words)), await verdict_of(app)
        await asyncio.to_thread(put_back, night, tmp_path / "copy")
        assert await eventually(is_well(app)), await verdict_of(app)


async def test_a_canary_that_a_replica_cannot_load_is_told_until_it_is_put_back(
    night: NightConfig, tmp_path: Path
) -> None:
    canary = build_verified(night, NEXT)
    async with serving(night, **PROMPT):
        await asyncio.to_thread(trial.start, night, canary, percent=50.0, attempt="start")
    shutil.copytree(store_folder(night), tmp_path / "copy")
    await asyncio.to_thread(lose_folder, night, canary)
    # the store is not checked here: it is the replica that says what it lacks
    async with serving(night, **PROMPT | {"figures_s": 600.0}) as app:

        async def is_told() -> bool:
            verdict = await verdict_of(app)
            sentence = verdict["sentence"]
            is_expected = "The canary's share is answered from the live generation by" in sentence
            return is_expected and f"{canary} cannot be loaded: " in sentence and verdict["level"] == "warn"

        assert await eventually(is_told), await verdict_of(app)
        await asyncio.to_thread(put_back, night, tmp_path / "copy")
        assert await eventually(is_well(app)), await verdict_of(app)
