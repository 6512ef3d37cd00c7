"""Capacity of each Redis node and host for all generations of a night's peak, by the arithmetic of the gates."""

from dataclasses import dataclass

from cache.control.control_keys import Control
from cache.errors import Refused
from cache.l2.sync_clients import compute_keyspace_shares, connect, primary_clients
from cache.process.host import disk_free_bytes, memory_available_bytes
from precompute.bulk.headroom import ArmRoom, redis_page_bytes, sum_mapped_bytes, unevictable_bytes
from precompute.config.settings import GateThresholds, NightConfig, peak_generation_count
from precompute.gates.evidence.candidate import Verdict
from precompute.gates.rules.headroom import (
    disk_headroom,
    disk_room,
    memory_headroom,
    memory_limit,
    memory_room,
    redis_headroom,
    redis_room,
)
from precompute.traffic.experiments import compute_arm_rooms

GB = 10**9


@dataclass(frozen=True, slots=True)
class RedisNode:
    """Redis server: the share of the pages that it stores, its memory limit, and the bytes of its other data."""

    name: str
    page_share: float
    limit_bytes: int
    limit_source: str
    other_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CapacityLimits:
    """Available room; `memory_bytes` of a reader's host, `disk_bytes` of the artefact store.

    `arms` are experiments' arms served besides; the growth of their pages at a peak is in the nodes' `other_bytes`.
    """

    nodes: tuple[RedisNode, ...]
    memory_bytes: int
    disk_bytes: int
    arms: tuple[ArmRoom, ...] = ()


def judge_capacity(
    limits: CapacityLimits,
    thresholds: GateThresholds,
    *,
    generation_count: int,
    redis_bytes: float,
    mapped_bytes: int,
    disk_bytes: int,
) -> list[Verdict]:
    """Return the verdicts on each node, then on the host's memory and disk.

    Sizes are of one generation, of which `generation_count` exist at the peak.
    """
    node_measurements = [
        redis_room(
            node.name, node.other_bytes + round(generation_count * redis_bytes * node.page_share),
            node.limit_bytes, f"{node.limit_source}, for {generation_count} generations", thresholds.redis_headroom,
        )
        for node in limits.nodes
    ]  # fmt: skip
    memory_measurement = memory_room(
        limits.memory_bytes, mapped_bytes, thresholds.memory_headroom, generation_count=generation_count,
        arms_bytes=sum_mapped_bytes(limits.arms, generation_count),
    )  # fmt: skip
    disk_measurement = disk_room(
        limits.disk_bytes, disk_bytes, thresholds.disk_headroom, generation_count=generation_count
    )
    gate_measurements = [(redis_headroom, node_measurement) for node_measurement in node_measurements]
    gate_measurements += [(memory_headroom, memory_measurement), (disk_headroom, disk_measurement)]
    return [measurement.to_verdict(gate.rule) for gate, measurement in gate_measurements]


def demand_room(capacity_verdicts: list[Verdict]) -> None:
    """Raise Refused naming everything that does not fit; its rule, value and threshold are the first failure's."""
    failed_verdicts = [verdict for verdict in capacity_verdicts if not verdict.passed]
    if failed_verdicts:
        first_failed = failed_verdicts[0]
        failures_text = "; ".join(
            f"{verdict.rule} {verdict.measured_value} against {verdict.threshold}: {verdict.note}"
            for verdict in failed_verdicts
        )
        raise Refused(
            f"the generations of a night at its peak would not fit: {failures_text}",
            rule=first_failed.rule,
            value=first_failed.measured_value,
            threshold=first_failed.threshold,
        )


def find_limits(
    config: NightConfig,
    *,
    record_bytes: int,
    redis_gb: float | None = None,
    stated_nodes: int | None = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
) -> CapacityLimits:
    """Return the given limits, else those of the configured Redis, this host and its disk.

    Room taken by this namespace's generations counts as free, since the planned ones would replace them.
    """
    store_folder = config.store().local("")
    stored_bytes = sum(path.stat().st_size for path in store_folder.rglob("*") if path.is_file())
    arms: tuple[ArmRoom, ...] = ()
    stated_redis_bytes = None if redis_gb is None else round(redis_gb * GB)
    if stated_redis_bytes is not None or not config.redis_url:
        node_count = stated_nodes or 1
        limit_bytes, limit_source = (
            (memory_available_bytes(), "this host's free memory")
            if stated_redis_bytes is None
            else (stated_redis_bytes, "as given")
        )
        redis_nodes = tuple(
            RedisNode(
                "primary" if node_count == 1 else f"primary {node_index + 1}", 1 / node_count, limit_bytes, limit_source
            )
            for node_index in range(node_count)
        )
    else:
        redis_nodes, arms = _read_nodes(config, record_bytes)
    return CapacityLimits(
        redis_nodes,
        memory_available_bytes() if host_gb is None else round(host_gb * GB),
        disk_free_bytes(store_folder) + stored_bytes if disk_gb is None else round(disk_gb * GB),
        arms,
    )


def _read_nodes(config: NightConfig, record_bytes: int) -> tuple[tuple[RedisNode, ...], tuple[ArmRoom, ...]]:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        control, share_by_node = Control(client, config.keyspace()), compute_keyspace_shares(client)
        own_bytes, arms = (redis_page_bytes(config.store(), control), compute_arm_rooms(config, client))
        arm_growth_bytes = sum(arm.growth_bytes(peak_generation_count(config.keep)) for arm in arms)
        nodes = []
        for node_name, server in primary_clients(client).items():
            own_node_bytes = own_bytes * share_by_node[node_name]
            used_bytes = unevictable_bytes(control, server, pages_bytes=own_node_bytes, record_bytes=record_bytes)
            other_bytes = max(0, round(used_bytes - own_node_bytes + arm_growth_bytes * share_by_node[node_name]))
            nodes.append(RedisNode(node_name, share_by_node[node_name], *memory_limit(server), other_bytes))
        return tuple(nodes), arms
