"""What Prometheus hears of the nights: from the live generation's manifest, the release records and Redis."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from prometheus_client.registry import CollectorRegistry

from cache.config.timetable import MISSED_TICKS_MAX, Schedule
from cache.errors import TierUnavailable
from cache.store.night_failure import NightFailure
from serving.engine.leases import LeaseCounts
from serving.generations.nights import NightMetrics, Nights, RedisMemory, ReleaseWatch
from serving.metrics.collectors import HELP_BY_EVENT, InternalCounters
from tests.fakes import THREADS, FakeControl
from tests.unit.serving.world import World

MANIFEST = World().snapshot().manifest
HOUR_S = 3_600.0
NOW = 1_700_000_000.0


class FakeRedis(FakeControl):
    """Says of itself what a test says, or nothing."""

    def __init__(self, *infos: dict[str, Any]) -> None:
        self.told: list[dict[str, Any]] = list(infos)

    async def infos(self) -> list[dict[str, Any]]:
        if not self.told:
            raise TierUnavailable("away", reason="connection")
        return self.told


def registered(manifest: Any, room: RedisMemory, releases: ReleaseWatch) -> CollectorRegistry:
    served: Any = None if manifest is None else SimpleNamespace(live=SimpleNamespace(manifest=manifest))  # fmt: skip
    nights = Nights(Schedule("0 * * * *", grace_s=0), SimpleNamespace(served=served), lambda: NOW)  # type: ignore[arg-type]
    registry = CollectorRegistry()
    registry.register(NightMetrics(lambda: served, nights, releases, room))
    return registry


def releases() -> ReleaseWatch:
    store: Any = None
    return ReleaseWatch(store, THREADS)


def test_before_anything_is_served_all_nights_are_missed_and_nothing_else_is_told() -> None:
    registry = registered(None, RedisMemory(FakeRedis()), releases())

    value_by_name = {sample.name: sample.value for family in registry.collect() for sample in family.samples}

    assert value_by_name == {"larder_nights_missed": MISSED_TICKS_MAX}


def test_the_manifest_tells_steps_sizes_and_what_the_gates_measured() -> None:
    gates = (
        {"rule": "score_psi", "passed": True, "value": 0.3, "threshold": 0.25, "overridden": "known"},
        {"rule": "live_files", "passed": True, "value": "text", "threshold": None},
    )  # fmt: skip
    night = {"users": {"copied": 8, "inputs": 2}, "spared_s": 1.5}
    manifest = dataclasses.replace(
        MANIFEST, gates=gates, timings={"score": 2.5}, created_at=int(NOW - 2 * HOUR_S),
        facts={"reuse": {**night, "base": "g", "why": "", "read_because": "", "nights": [night]}},
    )  # fmt: skip
    release_watch = releases()
    release_watch.last_time_by_action, release_watch.failed_gate_rules = ({"publish": 7.0}, frozenset({"skew"}))
    release_watch.failure = NightFailure("score, shard 3", None, 9.0, "refused: full")
    value = registered(manifest, RedisMemory(FakeRedis()), release_watch).get_sample_value

    assert value("larder_night_failed", {"step": "score"}) == 1.0
    assert value("larder_night_step_seconds", {"step": "score"}) == 2.5
    assert value("larder_generation_users", {"reason": "copied"}) == 8
    assert value("larder_generation_users", {"reason": "inputs"}) == 2
    assert value("larder_night_spared_seconds") == 1.5
    assert value("larder_gate_value", {"rule": "score_psi"}) == 0.3
    assert value("larder_gate_threshold", {"rule": "score_psi"}) == 0.25
    assert value("larder_gate_overridden", {"rule": "score_psi"}) == 1.0
    assert value("larder_gate_value", {"rule": "live_files"}) is None
    assert value("larder_last_release_timestamp_seconds", {"action": "publish"}) == 7.0
    assert value("larder_gate_refused", {"rule": "skew"}) == 1.0
    assert value("larder_nights_missed") == 2.0
    assert value("larder_generation_data_until_timestamp_seconds") == manifest.data_until
    for name, table in manifest.tables.items():
        size = sum(part.file.size_bytes for part in table.parts)
        assert value("larder_generation_size_bytes", {"table": name}) == size


async def test_the_room_of_all_nodes_is_told_while_redis_can_be_asked() -> None:
    redis = FakeRedis({"used_memory": 3, "maxmemory": 10}, {"used_memory": 4, "maxmemory": 10})
    room = RedisMemory(redis)
    await room.refresh()
    assert (room.redis_used_bytes, room.redis_max_bytes) == (7, 20)

    redis.told[1]["maxmemory"] = 0
    await room.refresh()
    assert room.redis_max_bytes == 0

    redis.told.clear()
    await room.refresh()
    assert room.redis_used_bytes is None


def test_an_event_is_a_counter_of_its_own_with_a_text() -> None:
    (family,) = InternalCounters(lambda: {"l2_reads": 3.0}).collect()

    assert (family.name, family.documentation) == ("larder_l2_reads", HELP_BY_EVENT["l2_reads"])
    assert set(LeaseCounts().internal_counters()) <= set(HELP_BY_EVENT)
