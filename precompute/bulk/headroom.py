"""Headroom: room in Redis and on disk for one more generation, and time limits of its load."""

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

REDIS_USED_MAX = GateThresholds().redis_headroom
"""Share of `maxmemory` that may be in use after a load, independent of the gate's setting."""

OVERLAY_EXTRA_BYTES = 256
"""Bytes that an overlay's key, expiry and bookkeeping add to its record."""


@dataclass(frozen=True, slots=True)
class ArmRoom:
    """Room of a namespace that arms name: `pages` and `size_bytes` of all its generations in Redis.

    `largest_bytes` of pages and `mapped_bytes` of files on a reader's host are those of its largest generation.
    """

    namespace: str
    arms: tuple[str, ...]
    generations: int
    pages: int
    size_bytes: int
    largest_bytes: int
    mapped_bytes: int

    def growth_bytes(self, generations: int) -> int:
        """Return the bytes by which its pages grow if so many generations of its largest size coexist."""
        return max(0, generations * self.largest_bytes - self.size_bytes)

    def __str__(self) -> str:
        return f"{', '.join(self.arms)} ({self.namespace}): {self.pages:,} pages, {self.size_bytes:,} bytes"


def sum_mapped_bytes(arms: Iterable[ArmRoom], generations: int) -> int:
    """Return the bytes that readers map for the arms if so many generations of each coexist on a host."""
    return sum(generations * arm.mapped_bytes for arm in arms)


def demand_redis(
    control: Control, generation: str, size_bytes: int, *, pages_bytes: int, record_bytes: int
) -> None:
    """Raise Refused unless Redis' `maxmemory` has room for these bytes; in a cluster, each node for its share."""
    share_by_node = compute_keyspace_shares(control.client)
    for name, server in primary_clients(control.client).items():
        info: Any = server.info("memory")
        limit = info_number(info, "maxmemory", 0)
        if not limit:
            continue
        more = round(size_bytes * share_by_node[name])
        used = unevictable_bytes(
            control,
            server,
            pages_bytes=pages_bytes * share_by_node[name],
            record_bytes=record_bytes,
        )
        if used + more > REDIS_USED_MAX * limit:
            where = "" if name == "primary" else f" on {name}"
            raise Refused(
                f"loading {generation} needs {more:,} bytes{where} beside {used:,} in use, more than "
                f"{REDIS_USED_MAX:.0%} of Redis' maxmemory {limit:,}, after what nobody needs was swept: raise it, or "
                "unpin generations and end a canary (`larder status` lists them)",
                rule=REDIS_HEADROOM_RULE,
                value=used + more,
                threshold=int(REDIS_USED_MAX * limit),
            )


def unevictable_bytes(
    control: Control, server: "redis.Redis", *, pages_bytes: float, record_bytes: int
) -> int:
    """Return the memory of one server that no pressure frees: all but overlays, of any namespace.

    Redis does not say what its expiring keys take, so each is taken for one overlay of the largest record
    (`record_bytes`): other namespaces' pages stay in the sum. `pages_bytes` are known to stay in any case.
    """
    info: Any = server.info("memory")
    keyspace: Any = server.info("keyspace")
    used = info_number(info, "used_memory")
    with refusing_unreadable("INFO", "counts of keys by database"):
        expiring = sum(int(database["expires"]) for database in keyspace.values())
    if not expiring or not control.check_policy().startswith("volatile-"):
        return used
    dataset = info_number(info, "used_memory_dataset", used)
    overlays = expiring * (record_bytes + OVERLAY_EXTRA_BYTES)
    return min(used, used - dataset + max(round(pages_bytes), dataset - overlays))


def held_bytes(store: ArtefactStore, control: Control, *, but: str | None = None) -> int:
    """Return the payload of this namespace's generations, other than `but`, whose pages Redis may hold."""
    total = 0
    for generation, row in control.rows().items():
        if generation != but and row.state is not GenerationState.RETIRED:
            raw = store.read(generation_path(generation, "manifest.json"))
            total += 0 if raw is None else total_bytes(Manifest.from_bytes(raw))
    return total


def demand_disk(folder: Path, size_bytes: int) -> None:
    """Raise Refused unless the file system of `folder` has room for these bytes."""
    existing_folder = next(ancestor for ancestor in (folder, *folder.parents) if ancestor.exists())
    free = shutil.disk_usage(existing_folder).free
    if free < size_bytes:
        raise Refused(
            f"{size_bytes:,} bytes are about to be written to {existing_folder}, which has {free:,} left; "
            "free space, retire generations or move `artifacts`, then run the step again",
            rule=DISK_HEADROOM_RULE,
            value=free,
            threshold=size_bytes,
        )


def writes_files(
    step: Callable[Concatenate[NightConfig, P], R],
) -> Callable[Concatenate[NightConfig, P], R]:
    """Wrap a step so that its writers, numpy's, Arrow's and FAISS' included, raise StoreError on a full disk."""

    @functools.wraps(step)
    def run(config: NightConfig, /, *arguments: P.args, **options: P.kwargs) -> R:
        with disk_errors(Path(config.artifacts)):
            return step(config, *arguments, **options)

    return run


def floor_seconds(config: NightConfig, size_bytes: float) -> float:
    """Return the longest time in seconds of moving these bytes under load: at `[governor] floor_mib_s`."""
    return size_bytes / (config.governor.floor_mib_s * MIB)


def time_limit_remark(config: NightConfig, size_bytes: float) -> str | None:
    """Return a remark on the limits of `[dag]` that a load or its verification may exceed; None if none."""
    seconds = floor_seconds(config, size_bytes)
    limits = {
        "load_timeout_s": config.dag.load_timeout_s,
        "verify_timeout_s": config.dag.verify_timeout_s,
    }
    short = {name: limit for name, limit in limits.items() if seconds > limit}
    if not short:
        return None
    allowed = " and ".join(f"{name} ({limit:,.0f} s)" for name, limit in short.items())
    floor = size_bytes / (min(short.values()) * MIB)
    return (
        f"beside busy readers {size_bytes / 1e9:,.1f} GB of pages take up to {seconds:,.0f} s, at floor_mib_s "
        f"({config.governor.floor_mib_s:g} MiB/s), and Airflow ends a try after {allowed}: raise "
        f"{' and '.join(short)} in [dag], or floor_mib_s in [governor] beyond {floor:,.3g}"
    )
