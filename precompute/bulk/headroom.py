"""Headroom: free memory of Redis and free disk for one more generation, and time limits of its load."""

import functools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import redis

from cache.config.night import DISK_HEADROOM_RULE, REDIS_HEADROOM_RULE, NightConfig
from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import Refused
from cache.format.manifest import Manifest
from cache.l2.resp import info_number, refusing_unreadable
from cache.l2.sync_clients import compute_keyspace_shares, primary_clients
from cache.store.artefacts import ArtefactStore, disk_errors, generation_path
from precompute.bulk.load import total_bytes
from precompute.config.settings import GateThresholds

P = ParamSpec("P")
R = TypeVar("R")

MIB: Final = 1 << 20

REDIS_USED_SHARE_MAX = GateThresholds().redis_headroom
"""Share of `maxmemory` that may be in use after a load, independent of the gate's setting."""

OVERLAY_EXTRA_BYTES = 256
"""Bytes that an overlay's key, expiry and bookkeeping add to its record."""


@dataclass(frozen=True, slots=True)
class ArmRoom:
    """Room of a namespace that arms name: `pages` and `size_bytes` of all its generations in Redis.

    `largest_bytes` is the size of the pages, and `mapped_bytes` that of the files on a reader's host, of its largest
    generation.
    """

    namespace: str
    arms: tuple[str, ...]
    generations: int
    pages: int
    size_bytes: int
    largest_bytes: int
    mapped_bytes: int

    def growth_bytes(self, generation_count: int) -> int:
        """Return the bytes by which the pages grow if this many generations of the largest size coexist."""
        return max(0, generation_count * self.largest_bytes - self.size_bytes)

    def __str__(self) -> str:
        return f"{', '.join(self.arms)} ({self.namespace}): {self.pages:,} pages, {self.size_bytes:,} bytes"


def sum_mapped_bytes(arm_rooms: Iterable[ArmRoom], generation_count: int) -> int:
    """Return the bytes that readers map for the arms if this many generations of each coexist on a host."""
    return sum(generation_count * arm_room.mapped_bytes for arm_room in arm_rooms)


def demand_redis_room(
    control: Control, generation: str, size_bytes: int, *, pages_bytes: int, record_bytes: int
) -> None:
    """Raise Refused unless Redis' `maxmemory` has room for these bytes; in a cluster, each node for its share."""
    share_by_node = compute_keyspace_shares(control.client)
    for node_name, node_client in primary_clients(control.client).items():
        memory_info: Any = node_client.info("memory")
        maxmemory_bytes = info_number(memory_info, "maxmemory", 0)
        if not maxmemory_bytes:
            continue
        needed_bytes = round(size_bytes * share_by_node[node_name])
        used_bytes = unevictable_bytes(
            control, node_client, pages_bytes=pages_bytes * share_by_node[node_name], record_bytes=record_bytes
        )
        if used_bytes + needed_bytes > REDIS_USED_SHARE_MAX * maxmemory_bytes:
            node_text = "" if node_name == "primary" else f" on {node_name}"
            raise Refused(
                (
                    f"loading {generation} needs {needed_bytes:,} bytes{node_text} in addition to {used_bytes:,} in "
                    f"use, more than {REDIS_USED_SHARE_MAX:.0%} of Redis' maxmemory {maxmemory_bytes:,}, even after "
                    "unneeded generations were swept: raise maxmemory, or unpin generations and end a canary (`larder "
                    "status` lists them)"
                ),
                rule=REDIS_HEADROOM_RULE,
                value=used_bytes + needed_bytes,
                threshold=int(REDIS_USED_SHARE_MAX * maxmemory_bytes),
            )


def unevictable_bytes(control: Control, node_client: "redis.Redis", *, pages_bytes: float, record_bytes: int) -> int:
    """Return the memory of one server that eviction cannot free: all but overlays, of any namespace.

    Redis does not report the size of its expiring keys, so each counts as one overlay of the largest record
    (`record_bytes`): other namespaces' pages stay in the sum. `pages_bytes` count in any case.
    """
    memory_info: Any = node_client.info("memory")
    database_stats: Any = node_client.info("keyspace")
    used_bytes = info_number(memory_info, "used_memory")
    with refusing_unreadable("INFO", "counts of keys by database"):
        expiring_key_count = sum(int(database["expires"]) for database in database_stats.values())
    if not expiring_key_count or not control.check_eviction_policy().startswith("volatile-"):
        return used_bytes
    dataset_bytes = info_number(memory_info, "used_memory_dataset", used_bytes)
    overlay_bytes = expiring_key_count * (record_bytes + OVERLAY_EXTRA_BYTES)
    return min(used_bytes, used_bytes - dataset_bytes + max(round(pages_bytes), dataset_bytes - overlay_bytes))


def redis_page_bytes(store: ArtefactStore, control: Control, *, left_out_generation: str | None = None) -> int:
    """Return the payload of this namespace's generations that Redis may hold, without that of `left_out_generation`."""
    held_page_bytes = 0
    for generation, row in control.rows().items():
        if generation != left_out_generation and row.state is not GenerationState.RETIRED:
            raw_manifest = store.read(generation_path(generation, "manifest.json"))
            held_page_bytes += 0 if raw_manifest is None else total_bytes(Manifest.from_bytes(raw_manifest))
    return held_page_bytes


def demand_disk_room(folder: Path, size_bytes: int) -> None:
    """Raise Refused unless the file system of `folder` has room for these bytes."""
    existing_folder = next(ancestor for ancestor in (folder, *folder.parents) if ancestor.exists())
    free_bytes = shutil.disk_usage(existing_folder).free
    if free_bytes < size_bytes:
        raise Refused(
            f"{size_bytes:,} bytes are needed in {existing_folder}, which has {free_bytes:,} free; free space, retire "
            "generations or move `artifacts`, then run the step again",
            rule=DISK_HEADROOM_RULE,
            value=free_bytes,
            threshold=size_bytes,
        )


def convert_disk_errors(step: Callable[Concatenate[NightConfig, P], R]) -> Callable[Concatenate[NightConfig, P], R]:
    """Wrap a step so that its writers, those of numpy, Arrow and FAISS included, raise StoreError on a full disk."""

    @functools.wraps(step)
    def run(config: NightConfig, /, *arguments: P.args, **options: P.kwargs) -> R:
        with disk_errors(Path(config.artifacts)):
            return step(config, *arguments, **options)

    return run


def seconds_at_floor_rate(config: NightConfig, size_bytes: float) -> float:
    """Return the longest time in seconds to move these bytes while readers are busy: at `[governor] floor_mib_s`."""
    return size_bytes / (config.governor.floor_mib_s * MIB)


def time_limit_remark(config: NightConfig, size_bytes: float) -> str | None:
    """Return a remark on limits of `[dag]` that a load or its verification may exceed; None if there are none."""
    load_s_max = seconds_at_floor_rate(config, size_bytes)
    limit_s_by_setting = {"load_timeout_s": config.dag.load_timeout_s, "verify_timeout_s": config.dag.verify_timeout_s}
    short_limit_s_by_setting = {
        setting_name: limit_s for setting_name, limit_s in limit_s_by_setting.items() if load_s_max > limit_s
    }
    if not short_limit_s_by_setting:
        return None
    limits_text = " and ".join(
        f"{setting_name} ({limit_s:,.0f} s)" for setting_name, limit_s in short_limit_s_by_setting.items()
    )
    floor_mib_s_min = size_bytes / (min(short_limit_s_by_setting.values()) * MIB)
    return (
        f"with busy readers {size_bytes / 1e9:,.1f} GB of pages take up to {load_s_max:,.0f} s, at floor_mib_s "
        f"({config.governor.floor_mib_s:g} MiB/s), and Airflow ends a try after {limits_text}: raise "
        f"{' and '.join(short_limit_s_by_setting)} in [dag], or floor_mib_s in [governor] beyond {floor_mib_s_min:,.3g}"
    )
