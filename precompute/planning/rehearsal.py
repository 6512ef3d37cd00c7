"""A rehearsal of the load, in a Redis of our own: what a page costs there, and how fast pages go in."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import redis

from cache.format.manifest import Manifest, Producer, Table, TablePart
from cache.format.manifest_files import Artefact, ItemFiles
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import generation_path
from precompute.builds.build import Build
from precompute.builds.tables import records_per_page
from precompute.bulk.load import total_bytes
from precompute.bulk.watch import cpu_s
from precompute.config.settings import NightConfig
from precompute.planning.sizes import NightShape
from precompute.planning.spent import TimedRun, TimeSpent, grown, middle, timed
from precompute.steps import load

GENERATION = "20000101T000000Z-000000000000"
LARGEST_BYTES = 256 << 20
REPEATS = 3


def page_costs(client: "redis.Redis", keys: Keyspace, sizes: Iterable[int]) -> dict[int, int]:
    """Memory that Redis takes for a page of each size: key, entry, value and what its allocator rounds up."""
    costs = {}
    for size in sorted(set(sizes)):
        # As long a key as any: allocators round up.
        name = keys.page(GENERATION, "user_topk", 100)
        client.set(name, bytes(size))
        memory_bytes: Any = client.memory_usage(name)
        costs[size] = int(memory_bytes)
        client.delete(name)
    return costs


def time_load(config: NightConfig, shape: NightShape, client: "redis.Redis") -> TimeSpent:
    """The night's own step, flat out, over pages of zeros; `config` has a store and a Redis that are for this alone.

    As many parts as the night will have, at most LARGEST_BYTES; beyond that on the line through that and a quarter.
    """
    payload_share = min(1.0, LARGEST_BYTES / max(1, shape.payload_bytes))
    small, large = (
        _load(config, shape, run_share, client) for run_share in (payload_share / 4, payload_share)
    )
    return grown(small, large, shape.payload_bytes)


def _load(
    config: NightConfig, shape: NightShape, payload_share: float, client: "redis.Redis"
) -> TimedRun:
    build = Build.of(config, {"generation": GENERATION})
    manifest = _manifest(config.namespace, shape, payload_share, build.root)
    build.store.write(generation_path(GENERATION, "manifest.json"), manifest.to_bytes())
    run_times = []
    for _ in range(REPEATS):
        client.flushall(asynchronous=False)
        spent, _ = timed(
            lambda: load.run(config, {"generation": GENERATION}),
            lambda: cpu_s(cast(Any, client.info("cpu"))),
        )
        run_times.append(spent)
    client.flushall(asynchronous=False)
    return TimedRun(total_bytes(manifest), middle(run_times))


def _manifest(namespace: str, shape: NightShape, payload_share: float, folder: Path) -> Manifest:
    """All tables in all their parts, each with this share of its records, in files that take no room."""
    tables = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (entity, layout) in shape.layouts.items():
        records = shape.users if entity == "user" else shape.items
        count = round(records * payload_share / shape.shards)
        file = Artefact(f"{name}.pages", count * layout.size_bytes, "")
        with (folder / file.path).open("wb") as pages:
            pages.truncate(file.size_bytes)
        per_page = records_per_page(layout, shape.page_bytes)
        parts = tuple(
            TablePart(part * -(-count // per_page), -(-count // per_page), count, file, file)
            for part in range(shape.shards)
        )
        tables[name] = Table(name, entity, Producer("none"), layout, per_page, parts, ())
    none = Artefact("none", 0, "")
    items = ItemFiles(none, none, none, none, 0, 0)
    return Manifest(namespace, GENERATION, 0, 0, "", "", {}, items, tables, {}, {}, none, ())
