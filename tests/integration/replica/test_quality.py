"""Served answers computed once more by the real models: a sound generation agrees, altered pages do not.

Also what is read of a generation and what is asked for in vain, over several replicas through a real Redis.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis

from cache.control.control_keys import Control
from cache.errors import TierUnavailable
from cache.format.ids import hash_id
from cache.format.item_table import ItemTable
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.quality.probe import PROBE_FACT, Probe
from precompute.config.settings import NightConfig
from serving.quality.monitor import QualityMonitor
from tests.attached import attached
from tests.integration.nights import build_night, histories
from tests.integration.rearranged import rearrange
from tests.integration.serving_app import Running, eventually, serving
from tests.opened import open_generation

ALL: dict[str, Any] = {"quality_per_mille": 1_000.0, "quality_cpu_share": 1.0, "quality_s": 0.1}
WITHIN = 25
"""Samples, where every record of a table was altered."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("sound"), redis_url, users=300, items=100)


@pytest.fixture
def night(tmp_path: Path, redis_url: str) -> NightConfig:
    return build_night(tmp_path / "night", redis_url, users=120, items=100)


def live_generation(night: NightConfig) -> str:
    with connect(night.redis_url, 5.0) as client:
        pointer = Control(client, night.keyspace()).read_pointer()
    assert pointer is not None
    return pointer.generation


def quality(app: Running) -> QualityMonitor:
    return attached(app.service, QualityMonitor)


def read_quality_report(app: Running) -> dict[str, Any]:
    report = quality(app).to_json()
    assert report is not None
    return report


def samples(app: Running, table: str) -> int:
    by = (quality(app).to_json() or {"by": ()})["by"]
    return sum(group["samples"] for group in by if group["table"] == table)


async def look_up(app: Running, table: str, ids: list[str], **options: Any) -> list[dict[str, Any]]:
    body = {"entities": [{"id": entity_id} for entity_id in ids], **options}
    answers: list[dict[str, Any]] = (await app.post(f"/v1/lookup/{table}", body))["answers"]
    return answers


async def sampled(app: Running, table: str, samples_min: int) -> bool:
    return await eventually(lambda: _has(app, table, samples_min), 30.0)


async def _has(app: Running, table: str, samples_min: int) -> bool:
    return samples(app, table) >= samples_min


async def test_a_sound_generation_agrees_with_its_model_in_every_table(sound: NightConfig) -> None:
    users = sorted(histories(sound))
    async with serving(sound, **ALL) as app:
        items = [answer["items"][0] for answer in await look_up(app, "user_topk", users[:40], k=50)]
        for table, ids in (
            ("user_topk", users[40:100]),
            ("user_vector", users[:30]),
            ("user_affinity", users[:30]),
            ("item_similar", items[:30]),
            ("item_vector", items[:30]),
        ):
            await look_up(app, table, ids)
            assert await sampled(app, table, 20)
        report = read_quality_report(app)
        text = await app.scrape_samples("larder_quality_samples_total")
        drift = await app.scrape_samples("larder_quality_drift")

    by = {(group["table"], group["source"]): group for group in report["by"]}
    assert {table for table, _ in by} == set(sound.tables)
    assert report["samples"] == sum(group["samples"] for group in report["by"]) == sum(text.values())
    assert report["overlap"]["low"] <= report["overlap"]["mean"] <= report["overlap"]["high"]
    assert report["overlap"]["mean"] > 0.9 and report["score_error"]["mean"] < 0.1
    assert not report["drift"] and "were the same" in report["sentence"]
    assert set(drift.values()) == {0.0}
    assert all(group["age_s"] > 0 for group in report["by"])


async def test_every_way_of_asking_is_sampled_and_says_what_it_was(night: NightConfig) -> None:
    # Use a night of its own: keys of other tests may be in Redis' sketch, which fills L1 at the start.
    users = sorted(histories(night))
    history = histories(night)[users[0]][:5]
    async with serving(night, **ALL) as app:
        for _ in range(3):  # Redis, L1, ready
            await app.get(f"/v1/lookup/user_topk/{users[0]}", k=5)
        await look_up(app, "user_topk", users[:20])
        await look_up(app, "user_topk", users[:20])
        body = {"entities": [{"id": "stranger", "history": list(history)}]}
        await app.post("/v1/lookup/user_topk", body)
        assert await sampled(app, "user_topk", 44)
        report = read_quality_report(app)

    by: dict[tuple[str, str], int] = {}
    for group in report["by"]:
        key = group["source"], group["producer"]
        by[key] = by.get(key, 0) + group["samples"]
    assert by == {("l2", "batch"): 20, ("l1", "batch"): 23, ("live", "live"): 1}
    (live,) = (group for group in report["by"] if group["producer"] == "live")
    assert live["exact"]["rate"] == 1.0 and live["band"] == "1-9" and live["age_s"] == 0.0


async def test_pages_that_were_altered_are_found_out_within_the_stated_number_of_samples(night: NightConfig) -> None:
    users = sorted(histories(night))
    rearrange(night, live_generation(night), "user_topk")
    async with serving(night, **ALL) as app:
        await look_up(app, "user_vector", users[:30])
        assert await sampled(app, "user_vector", 30)
        assert not read_quality_report(app)["drift"]

        answers = await look_up(app, "user_topk", users[:WITHIN])

        assert {answer["source"] for answer in answers} == {"l2"}
        assert await sampled(app, "user_topk", WITHIN)
        report = read_quality_report(app)
        drift = await app.scrape_samples("larder_quality_drift")
    assert report["drift"] and report["drifted"] == ["user_topk"]
    assert "restore" in report["sentence"]
    assert [table for (table,), value in drift.items() if value] == ["user_topk"]


async def test_replicas_tell_one_whole_of_samples_reads_and_ids_asked_for_in_vain(night: NightConfig) -> None:
    users = sorted(histories(night))[:60]
    async with serving(night, **ALL) as first, serving(night, **ALL) as second:
        await look_up(first, "user_topk", users[:40])
        await look_up(second, "user_topk", users[20:60])
        await look_up(first, "user_topk", ["stranger", "other"])
        await look_up(second, "user_topk", ["stranger"])

        async def is_report_complete() -> bool:
            parts = [read_quality_report(app) for app in (first, second)]
            read = await first.scrape_samples("larder_table_read_records")
            return (
                all(report["samples"] == 80 and report["worklist"] == 2 for report in parts)
                and abs(read["user_topk",] - 60) <= 1
            )

        assert await eventually(is_report_complete, 30.0)
        report = read_quality_report(second)
        records = await second.scrape_samples("larder_table_records")
        assert report["read_share"] == pytest.approx(60 / sum(records.values()), abs=0.01)
        size = sum((await second.scrape_samples("larder_table_bytes")).values())
        assert report["hits_per_gb"] == pytest.approx(80 / size * 1e9)
    with redis.Redis.from_url(str(night.redis_url)) as client:
        keys = Keyspace(night.namespace)
        assert client.hgetall(keys.quality_figures) == {}
        assert client.ttl(keys.quality_figures) in (-2, *range(121))


async def test_without_redis_every_replica_reports_its_own_quality(sound: NightConfig) -> None:
    users = sorted(histories(sound))
    async with serving(sound, **ALL) as app:
        await look_up(app, "user_topk", users[:5])
        assert await sampled(app, "user_topk", 5)
        shared_report = quality(app)._shared_report

        async def raise_unavailable(*_command: object) -> None:
            raise TierUnavailable("gone", reason="connection")

        shared_report._control.execute = raise_unavailable  # type: ignore[method-assign]
        await shared_report.report()

        report = read_quality_report(app)
    assert report["samples"] == 5 and report["worklist"] is None


async def test_the_budget_of_processor_time_is_kept_and_live_requests_come_first(sound: NightConfig) -> None:
    users = sorted(histories(sound))
    async with serving(sound, quality_per_mille=1_000.0, quality_cpu_share=0.02) as app:
        loop, sampler = asyncio.get_running_loop(), quality(app)._answer_judge
        started_at = loop.time()
        await look_up(app, "user_topk", users[:100])
        assert await eventually(lambda: _spent(app, 3))
        spent = (await app.scrape_samples("larder_quality_cpu_seconds_total"))[()]
        lasted = loop.time() - started_at
        # One judgement may begin before the length of its pause is known.
        assert spent <= 0.02 * lasted + 0.1

        sampler.is_model_busy = lambda: True
        waiting_count = len(app.service.ladder.observer.sampler)
        await sampler.step()

        skipped = await app.scrape_samples("larder_quality_skipped_total")
        assert waiting_count and skipped["overload",] >= waiting_count
        assert len(app.service.ladder.observer.sampler) == 0


async def _spent(app: Running, samples_min: int) -> bool:
    return sum((await app.scrape_samples("larder_quality_samples_total")).values()) >= samples_min


def test_the_probe_holds_what_the_night_computed_from(sound: NightConfig) -> None:
    generation = live_generation(sound)
    manifest, root = open_generation(sound.store(), generation)
    items = ItemTable.open(root, manifest)
    probe = Probe.open(root / manifest.facts[PROBE_FACT]["path"], items)
    history_by_user = histories(sound)
    seed, probed_count = manifest.entity_sets["user"].seed, 0
    for user, items_ in history_by_user.items():
        live_input = probe.input_of(hash_id(user.encode(), seed))
        if live_input is not None:
            probed_count += 1
            assert set(live_input.history or ()) == {item.encode() for item in items_}
    assert probed_count == len(probe) == manifest.entity_sets["user"].count
    assert probe.input_of(0) is None
