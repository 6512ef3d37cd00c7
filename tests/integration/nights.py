"""Small real nights: data, a trained bundle and a published generation, through the same steps as in production."""

import functools
import hashlib
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache.format.directory import Directory
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable
from cache.records import NO_ITEM, decode_record
from infra.demo.synthetic import Clicks, WorldSettings, synthesize
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import hand_over
from precompute.config.settings import NightConfig, ReferenceConfig, Sources, TableConfig
from precompute.reference.train import train_reference
from precompute.releases.recovery import roll_back as move_back
from precompute.releases.release_log import open_releases
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score, verify
from precompute.steps import publish as publish_step
from precompute.steps.night import Night, run_night
from tests.opened import open_generation

DATA_UNTIL = "2026-01-29T00:00:00Z"
NEXT = "2026-01-30T00:00:00Z"
K = 50
PATIENT_ENVIRON = {"LARDER_QUEUE_INTERVAL_MS": "60000"}
"""For a service under test: that its loop comes late on a busy machine is no overload. Benches measure without it."""


def build_night(
    folder: Path, redis_url: str, *, seed: int = 0, users: int = 400, items: int = 120, data_until: str = DATA_UNTIL
) -> NightConfig:
    """Publish one generation from `folder`'s data, which is made on the first call; a later cut adds a generation."""
    config = prepare(folder, redis_url, seed=seed, users=users, items=items)
    publish_night(config, data_until)
    return config


def prepare(folder: Path, redis_url: str, *, seed: int = 0, users: int = 400, items: int = 120) -> NightConfig:
    """Data and bundle under `folder`, in a namespace of its own; nothing is built yet."""
    config = _config(folder, redis_url)
    if not (folder / "interactions.parquet").exists():
        template_folder = Path(_make_template(seed, users, items).name)
        # Copy with the current time: nights are named after the newest change of an input.
        shutil.copytree(template_folder, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        hand_over(config.store(), Bundle.open(config.path(config.bundle)))
    return config


def _config(folder: Path, redis_url: str) -> NightConfig:
    return NightConfig(
        namespace=f"night-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}",
        artifacts="artifacts",
        state="state",
        bundle="bundle",
        redis_url=redis_url,
        shards=2,
        page_bytes=16 * 1024,
        threads=1,
        warm_timeout_s=5.0,
        sources=Sources(("interactions.parquet",), item_features="items.parquet"),
        tables={
            "user_topk": TableConfig("user_topk", k=K),
            "user_vector": TableConfig("user_vector"),
            "item_vector": TableConfig("item_vector"),
            "item_similar": TableConfig("item_similar", k=20, metric="cosine"),
            "user_affinity": TableConfig("value", precision="f4", value="user_affinity"),
        },
        reference=ReferenceConfig(dims=16, choose=False),
        base=str(folder),
    )


@functools.cache
def _make_template(seed: int, users: int, items: int) -> "tempfile.TemporaryDirectory[str]":
    """Return a folder with data and bundle of these sizes, made once: the bytes are always the same."""
    temporary_folder = tempfile.TemporaryDirectory(prefix="larder-made-")
    folder = Path(temporary_folder.name)
    write_clicks(folder, synthesize(WorldSettings(user_count=users, item_count=items, seed=seed)))
    train_reference(_config(folder, "redis://nowhere"), data_until=DATA_UNTIL)
    shutil.rmtree(folder / "artifacts")
    return temporary_folder


def write_clicks(folder: Path, clicks: Clicks) -> None:
    """Two Parquet files, as a team would hand them over."""
    users, item_ids = np.array(clicks.user_ids, object), np.array(clicks.item_ids, object)
    interactions = {
        "user": pa.array(users[clicks.user_rows], pa.string()),
        "item": pa.array(item_ids[clicks.item_rows], pa.string()),
        "timestamp": pa.array(clicks.times_us, pa.timestamp("us", tz="UTC")),
    }
    features = {"item": clicks.item_ids, "category": clicks.category_by_item}
    pq.write_table(pa.table(interactions), folder / "interactions.parquet")
    pq.write_table(pa.table(features), folder / "items.parquet")


def publish_night(config: NightConfig, data_until: str) -> str:
    """Run a whole night with this cut; return the generation."""
    attempt = f"test-{uuid.uuid4().hex[:8]}"
    lines = run_night(Night(config, attempt, data_until))
    return lines[0][1].result_summary.split()[0]


def build_verified(config: NightConfig, data_until: str, *, pinned: bool = False) -> str:
    """Run all steps but the publish; return the generation, pinned if a later night must not retire it."""
    build = begin.run(config, data_until=data_until, run_after=None)
    embed_items.run(config, build)
    for shard in build["shards"]:
        score.run_shard(config, build, shard)
    assemble.run(config, build)
    index.run(config, build)
    quantize.run(config, build)
    load.run(config, build)
    verify.run(config, build)
    if pinned:
        pin(config, build["generation"])
    return str(build["generation"])


def pin(config: NightConfig, generation: str) -> None:
    """Protect a generation from the retirement of later nights."""
    with open_releases(config) as releases:
        releases.pin(generation, reason="a test", expires_at=None, attempt=f"pin-{generation}")


def publish(config: NightConfig, generation: str, *, verify_again: bool = False) -> None:
    """Publish a verified generation; `verify_again` if another one became live since its verification."""
    if verify_again:
        verify.run(config, {"generation": generation})
    attempt = f"test-{uuid.uuid4().hex[:8]}"
    publish_step.run(config, {"generation": generation}, attempt=attempt)


def roll_back(config: NightConfig, to: str | None = None) -> str:
    """Roll back to an earlier generation; return the live one."""
    attempt = f"test-{uuid.uuid4().hex[:8]}"
    moved = move_back(config, target_generation=to, reason="a test says so", attempt=attempt)
    return str(moved["generation"])


def histories(config: NightConfig, data_until: str = DATA_UNTIL) -> dict[str, list[str]]:
    """Return each user's clicks before the cut, oldest first, from the source file itself."""
    table = pq.read_table(config.path("interactions.parquet"))
    cut = datetime.fromisoformat(data_until)
    history_by_user: dict[str, list[str]] = {}
    rows = zip(table["user"].to_pylist(), table["item"].to_pylist(), table["timestamp"].to_pylist(), strict=True)
    for user, item, at in sorted(rows, key=lambda row: row[2]):
        if at < cut:
            history_by_user.setdefault(user, []).append(item)
    return history_by_user


def top_lists(
    config: NightConfig, generation: str, ids: list[str], table: str = "user_topk"
) -> Mapping[str, tuple[str, ...]]:
    """Return the lists of `ids` from the generation's page files, without Redis and service."""
    manifest, root = open_generation(config.store(), generation)
    items = ItemTable.open(root, manifest)
    lists: dict[str, tuple[str, ...]] = {}
    for name, raw in raw_records(config, generation, ids, table).items():
        record = decode_record(manifest.tables[table].layout, raw)
        assert record.item_ordinals is not None
        ordinals = record.item_ordinals[record.item_ordinals != NO_ITEM]
        lists[name] = tuple(items.ids_of(ordinals))
    return lists


def raw_records(config: NightConfig, generation: str, ids: list[str], table: str = "user_topk") -> dict[str, bytes]:
    """Return the records of those `ids` that the generation has, from its page files."""
    manifest, root = open_generation(config.store(), generation)
    manifest_table = manifest.tables[table]
    directory = Directory.open(root, manifest.entity_sets[manifest_table.entity])
    size = manifest_table.layout.size_bytes
    parts = [(root / part.file.path).read_bytes() for part in manifest_table.parts]
    records: dict[str, bytes] = {}
    positions = directory.find_positions(hash_ids([entity_id.encode() for entity_id in ids], directory.seed))
    for name, position in zip(ids, positions.tolist(), strict=True):
        if position >= 0:
            part, offset = directory.locate_in_part(position)
            records[name] = parts[part][offset * size : (offset + 1) * size]
    return records


def environment(config: NightConfig, **more: str) -> dict[str, str]:
    """Return the environment to serve or restore these nights, with long deadlines, since tests share few cores."""
    return {
        "REDIS_URL": str(config.redis_url),
        "LARDER_CONFIG": "",
        "LARDER_ARTIFACTS": str(config.path(config.artifacts)),
        "LARDER_NAMESPACE": config.namespace,
        "LARDER_STATE": str(config.path(config.state)),
        "LARDER_TOKEN": "",
        "LARDER_DEADLINE_MS": "5000",
        "LARDER_L2_DEADLINE_MS": "1000",
        "LARDER_POLL_S": "0.2",
        **more,
    }
