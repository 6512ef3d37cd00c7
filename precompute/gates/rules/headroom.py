"""Gates on room: in Redis, and in memory and on disk of readers' hosts, for the generations at the peak."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import redis

from cache.config.night import DISK_HEADROOM_RULE, REDIS_HEADROOM_RULE
from cache.control.control_keys import Replica
from cache.l2.resp import info_number
from cache.l2.sync_clients import compute_keyspace_shares, primary_clients
from precompute.bulk.headroom import sum_mapped_bytes, unevictable_bytes
from precompute.config.settings import peak_generation_count
from precompute.gates.evidence.candidate import Candidate, Measurement, at_least, at_most, integrity


@integrity("maxmemory_policy")
def maxmemory_policy(candidate: Candidate) -> Measurement:
    """Check that Redis may evict only overlays."""
    return Measurement(True, candidate.control.check_eviction_policy(), "volatile-* or noeviction")


@integrity(REDIS_HEADROOM_RULE)
def redis_headroom(candidate: Candidate) -> Measurement:
    """Check the free room of Redis with this generation and all others, without keys that it can evict."""
    servers = primary_clients(candidate.control.client)
    measurements = [_server_headroom(candidate, server_name, server) for server_name, server in servers.items()]
    failed_measurements = [measurement for measurement in measurements if not measurement.passed]
    return (failed_measurements or sorted(measurements, key=_share_used))[-1]


def _server_headroom(candidate: Candidate, server_name: str, server: "redis.Redis") -> Measurement:
    used_bytes = info_number(cast(Any, server.info("memory")), "used_memory")
    if candidate.pages_bytes is not None:
        used_bytes = unevictable_bytes(
            candidate.control,
            server,
            pages_bytes=candidate.pages_bytes * compute_keyspace_shares(candidate.control.client)[server_name],
            record_bytes=max(table.layout.size_bytes for table in candidate.manifest.stored_tables.values()),
        )
    measurement = redis_room(server_name, used_bytes, *memory_limit(server), candidate.thresholds.redis_headroom)
    if not candidate.arm_rooms:
        return measurement
    arms_text = "; ".join(map(str, candidate.arm_rooms))
    return replace(measurement, note=f"{measurement.note}, with arms of experiments: {arms_text}")


def _share_used(measurement: Measurement) -> float:
    return measurement.measured_value if isinstance(measurement.measured_value, float) else 0.0


def redis_room(server_name: str, used_bytes: int, limit_bytes: int, limit_source: str, threshold: float) -> Measurement:
    """Measure a server's free room; servers have the names of `cache.l2.sync_clients.primary_clients`."""
    if not limit_bytes:
        return Measurement(False, None, threshold, "Redis states neither maxmemory nor its host's memory")
    server_text = "" if server_name == "primary" else f" of {server_name}"
    return at_most(
        used_bytes / limit_bytes, threshold, f"{used_bytes:,} bytes of {limit_bytes:,}, {limit_source}{server_text}"
    )


def memory_limit(server: "redis.Redis") -> tuple[int, str]:
    """Return the bytes that a server may use, 0 if unknown, and the source of that limit."""
    memory_info = dict(cast(Any, server.info("memory")))
    if limit_bytes := info_number(memory_info, "maxmemory", 0):
        return limit_bytes, "maxmemory"
    return info_number(memory_info, "total_system_memory", 0), "its host's memory (maxmemory is not set)"


@integrity(DISK_HEADROOM_RULE)
def disk_headroom(candidate: Candidate) -> Measurement:
    """Check the room on each replica's disk for its copy of this generation."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.disk_headroom

    def judge_disk(replica: Replica) -> Measurement | None:
        free_bytes = replica.disk_free_bytes
        return None if free_bytes is None else disk_room(free_bytes, size_bytes, threshold)

    return _measure_tightest(candidate, threshold, judge_disk)


@integrity("memory_headroom")
def memory_headroom(candidate: Candidate) -> Measurement:
    """Check each replica's available memory for all files mapped at the peak, those of arms of experiments included."""
    size_bytes, threshold = _mapped_bytes(candidate), candidate.thresholds.memory_headroom
    generation_count = peak_generation_count(candidate.superseded_count)
    arms_bytes = sum_mapped_bytes(candidate.arm_rooms, generation_count)

    def judge(replica: Replica) -> Measurement | None:
        available_bytes = replica.memory_available_bytes
        if available_bytes is None:
            return None
        return memory_room(
            available_bytes, size_bytes, threshold, generation_count=generation_count, arms_bytes=arms_bytes
        )

    return _measure_tightest(candidate, threshold, judge)


def disk_room(free_bytes: int, generation_bytes: int, threshold: float, *, generation_count: int = 1) -> Measurement:
    """Compare the free bytes of a file system with this number of generations of this size."""
    generations_text = "a generation" if generation_count == 1 else f"{generation_count} generations"
    return at_least(
        free_bytes / max(1, generation_count * generation_bytes),
        threshold,
        f"{free_bytes:,} bytes free for {generations_text} of {generation_bytes:,}",
    )


def memory_room(
    available_bytes: int, mapped_bytes: int, threshold: float, *, generation_count: int, arms_bytes: int = 0
) -> Measurement:
    """Compare a host's available memory with the mapped files of this number of generations of this size.

    `arms_bytes` are mapped for the arms of experiments.
    """
    size_bytes = generation_count * mapped_bytes
    arms_bytes_text = f", arms of experiments {arms_bytes:,}" if arms_bytes else ""
    return at_least(
        available_bytes / max(1, size_bytes + arms_bytes),
        threshold,
        f"{available_bytes:,} bytes available, {generation_count} generations map {size_bytes:,}{arms_bytes_text}",
    )


def _measure_tightest(
    candidate: Candidate, threshold: float, judge_replica: Callable[[Replica], Measurement | None]
) -> Measurement:
    """Return the verdict on the replica with the least room; passed without a replica: this host is no reader's."""
    replica_verdicts = [
        (replica.name, verdict)
        for replica in candidate.control.replicas()
        if (verdict := judge_replica(replica)) is not None
    ]
    if not replica_verdicts:
        return Measurement(True, None, threshold, "no live replica reports the free room of its host")
    replica_name, verdict = min(replica_verdicts, key=lambda named_verdict: float(named_verdict[1].measured_value or 0))
    return replace(verdict, note=f"{verdict.note} on {replica_name}")


def _mapped_bytes(candidate: Candidate) -> int:
    return sum(artefact.size_bytes for artefact in candidate.manifest.served_artefacts())
