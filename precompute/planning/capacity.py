"""Capacity of each Redis node and each host for all generations of a peak: the gates' own arithmetic, asked early."""

from dataclasses import dataclass

from cache.control.control_keys import Control
from cache.errors import Refused
from cache.l2.sync_clients import compute_keyspace_shares, connect, masters
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
    """Server of Redis: which share of the pages comes to it, its limit, and what else it holds."""

    name: str
    page_share: float
    limit_bytes: int
    limit_is: str
    other_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CapacityLimits:
    """Limits to fit into; `memory_bytes` is a reader's host, `disk_bytes` the artefact store's place.

    `arms` of experiments are served beside; what comes to their pages at a peak is among the nodes' other bytes.
    """

    nodes: tuple[RedisNode, ...]
    memory_bytes: int
    disk_bytes: int
    arms: tuple[ArmRoom, ...] = ()


def verdicts(
    limits: CapacityLimits,
    thresholds: GateThresholds,
    *,
    generations: int,
    redis_bytes: float,
    mapped_bytes: int,
    disk_bytes: int,
) -> list[Verdict]:
    """Verdicts on each node, then the host's memory and disk; sizes are of one generation, of which so many coexist."""
    nodes = [
        redis_room(
            node.name, node.other_bytes + round(generations * redis_bytes * node.page_share),
            node.limit_bytes, f"{node.limit_is}, for {generations} generations", thresholds.redis_headroom,
        )
        for node in limits.nodes
    ]  # fmt: skip
    memory = memory_room(
        limits.memory_bytes, mapped_bytes, thresholds.memory_headroom, generations=generations,
        arms_bytes=sum_mapped_bytes(limits.arms, generations),
    )  # fmt: skip
    disk = disk_room(
        limits.disk_bytes, disk_bytes, thresholds.disk_headroom, generations=generations
    )
    gate_measurements = [(redis_headroom, node_measured) for node_measured in nodes]
    gate_measurements += [(memory_headroom, memory), (disk_headroom, disk)]
    return [measured.under(gate.rule) for gate, measured in gate_measurements]


def demand_room(capacity_verdicts: list[Verdict]) -> None:
    """Raises Refused naming all that does not fit; rule, value and threshold are the first one's."""
    failed = [verdict for verdict in capacity_verdicts if not verdict.passed]
    if failed:
        first = failed[0]
        text = "; ".join(
            f"{verdict.rule} {verdict.value} against {verdict.threshold}: {verdict.note}"
            for verdict in failed
        )
        raise Refused(
            f"the generations of a night at its peak would not fit: {text}",
            rule=first.rule,
            value=first.value,
            threshold=first.threshold,
        )


def limits_of(
    config: NightConfig,
    *,
    record_bytes: int,
    redis_gb: float | None = None,
    nodes: int | None = None,
    host_gb: float | None = None,
    disk_gb: float | None = None,
) -> CapacityLimits:
    """Return the given limits, else those reported by the configured Redis, this host and its disk.

    Room taken by this namespace's own generations counts as free: the planned ones would take their place.
    """
    folder = config.store().local("")
    own_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    arms: tuple[ArmRoom, ...] = ()
    stated_bytes = None if redis_gb is None else round(redis_gb * GB)
    if stated_bytes is not None or not config.redis_url:
        count = nodes or 1
        limit, limit_source = (
            (memory_available_bytes(), "this host's free memory")
            if stated_bytes is None
            else (stated_bytes, "as given")
        )
        every = tuple(
            RedisNode(
                "primary" if count == 1 else f"primary {number + 1}", 1 / count, limit, limit_source
            )
            for number in range(count)
        )
    else:
        every, arms = _nodes(config, record_bytes)
    return CapacityLimits(
        every,
        memory_available_bytes() if host_gb is None else round(host_gb * GB),
        disk_free_bytes(folder) + own_disk if disk_gb is None else round(disk_gb * GB),
        arms,
    )


def _nodes(
    config: NightConfig, record_bytes: int
) -> tuple[tuple[RedisNode, ...], tuple[ArmRoom, ...]]:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        control, share_by_node = Control(client, config.keyspace()), compute_keyspace_shares(client)
        own_bytes, arms = (
            redis_page_bytes(config.store(), control),
            compute_arm_rooms(config, client),
        )
        growth = sum(arm.growth_bytes(peak_generation_count(config.keep)) for arm in arms)
        nodes = []
        for name, server in masters(client).items():
            own_node_bytes = own_bytes * share_by_node[name]
            used = unevictable_bytes(
                control, server, pages_bytes=own_node_bytes, record_bytes=record_bytes
            )
            other_bytes = max(0, round(used - own_node_bytes + growth * share_by_node[name]))
            nodes.append(RedisNode(name, share_by_node[name], *memory_limit(server), other_bytes))
        return tuple(nodes), arms
