"""Generations for the gates: a valid night, copied, spoilt in one way, with checksums adapted."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.errors import Refused
from cache.format.manifest import Manifest, Table
from cache.l2.sync_clients import connect
from cache.store.artefacts import describe_file, read_manifest
from infra.demo.synthetic import WorldSettings, synthesize
from precompute.bulk.load import unlink_pages
from precompute.config.settings import NightConfig, parse_time
from precompute.reference.train import train_reference
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score, verify
from tests.integration.nights import DATA_UNTIL, pin, prepare, publish_night, write_clicks


@dataclass(frozen=True, slots=True, eq=False)
class Spoilt:
    """A copy of the candidate's folder; `seal` updates the manifest after changes."""

    config: NightConfig
    root: Path
    generation: str
    other_root: Path
    live_root: Path
    data: dict[str, Any]

    @property
    def manifest(self) -> Manifest:
        """The manifest as the night wrote it."""
        return Manifest.from_bytes((self.root / "manifest.json").read_bytes())

    def table(self, name: str) -> Table:
        """Return one table of the manifest."""
        return self.manifest.tables[name]

    def records(self, name: str, part: int) -> NDArray[Any]:
        """Return a copy of a part's records."""
        table = self.table(name)
        return np.fromfile(self.root / table.parts[part].file.path, table.layout.dtype)

    def put(self, name: str, part: int, records: NDArray[Any]) -> None:
        """Write a part's records back, with the right page checksums."""
        table = self.table(name)
        entry, raw = table.parts[part], records.tobytes()
        (self.root / entry.file.path).write_bytes(raw)
        sums = [
            xxhash.xxh3_64_intdigest(raw[start : start + table.page_bytes])
            for start in range(0, len(raw), table.page_bytes)
        ]
        np.array(sums, "<u8").tofile(self.root / entry.sums.path)
        part_entries = self.data["tables"][name]["parts"]
        part_entries[part] |= {"count": len(records), "pages": len(sums)}
        first = 0
        for part_entry in part_entries:
            part_entry["first_page"] = first
            first += part_entry["pages"]

    def change(self, name: str, edit: Callable[[NDArray[Any]], NDArray[Any] | None]) -> None:
        """Change every part of a table, in place or by replacement."""
        for part in range(len(self.table(name).parts)):
            records = self.records(name, part)
            replacement = edit(records)
            self.put(name, part, records if replacement is None else replacement)

    def array(self, path: str, dtype: str) -> NDArray[Any]:
        """Return a copy of an array file."""
        return np.fromfile(self.root / path, dtype)

    def write(self, path: str, data: NDArray[Any] | bytes) -> None:
        """Replace a file."""
        (self.root / path).write_bytes(data if isinstance(data, bytes) else data.tobytes())

    def copy_from_other(self, path: str, source: str | None = None) -> None:
        """Replace a file by that of another night's generation."""
        shutil.copyfile(self.other_root / (source or path), self.root / path)

    def seal(self) -> None:
        """Write sizes and checksums of all files into the manifest."""
        write = orjson.dumps(_described(self.root, self.data), option=orjson.OPT_INDENT_2)
        (self.root / "manifest.json").write_bytes(write)


def _described(root: Path, data: Any) -> Any:
    if isinstance(data, dict):
        if data.keys() == {"path", "size_bytes", "sha256"}:
            artefact = describe_file(root, data["path"])
            return {"path": artefact.path, "size_bytes": artefact.size_bytes, "sha256": artefact.sha256}
        return {key: _described(root, value) for key, value in data.items()}
    return [_described(root, element) for element in data] if isinstance(data, list) else data


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A live generation, its valid successor, and a generation of another world."""

    config: NightConfig
    generation: str
    pristine_root: Path
    other_root: Path
    live: str

    def judge(
        self,
        spoil: Callable[[Spoilt], None] = lambda _spoilt: None,
        *,
        reseal: bool = True,
        in_redis: Callable[[Any, Manifest], None] = lambda _client, _manifest: None,
    ) -> dict[str, dict[str, Any]]:
        """Copy, spoil, seal, load, spoil in Redis, verify; return the verdicts by rule."""
        store = self.config.store()
        root, live_root = (
            store.local(f"generations/{generation_id}") for generation_id in (self.generation, self.live)
        )
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.pristine_root, root)
        data = orjson.loads((root / "manifest.json").read_bytes())
        spoilt = Spoilt(self.config, root, self.generation, self.other_root, live_root, data)
        spoil(spoilt)
        if reseal:
            spoilt.seal()
        return judged(self.config, self.generation, in_redis)


def judged(
    config: NightConfig, generation: str, in_redis: Callable[[Any, Manifest], None] = lambda _client, _manifest: None
) -> dict[str, dict[str, Any]]:
    """Load the built generation as if for the first time, and verify it; return the verdicts by rule."""
    with connect(config.redis_url, 5.0) as client:
        control, manifest = (Control(client, config.keyspace()), read_manifest(config.store(), generation))
        unlink_pages(client, config.keyspace(), manifest)
        control.set_row(generation, RegistryRow(GenerationState.BEGUN, time.time()))
        load.run(config, {"generation": generation})
        in_redis(client, manifest)
    with suppress(Refused):
        verify.run(config, {"generation": generation})
    gate_verdicts = read_manifest(config.store(), generation).gates
    return {str(verdict["rule"]): dict(verdict) for verdict in gate_verdicts}


def failed(verdicts: dict[str, dict[str, Any]]) -> set[str]:
    """Return the rules that refused."""
    return {rule for rule, verdict in verdicts.items() if not verdict["passed"]}


def build(config: NightConfig, cut: str) -> str:
    """Build a night up to its models, not loaded yet; return the sealed generation."""
    night_build = begin.run(config, data_until=cut, run_after=None)
    embed_items.run(config, night_build)
    for shard in night_build["shards"]:
        score.run_shard(config, night_build, shard)
    assemble.run(config, night_build)
    index.run(config, night_build)
    quantize.run(config, night_build)
    load.run(config, night_build)
    return str(night_build["generation"])


def cut_at(config: NightConfig, fraction: float) -> str:
    """Return the time before which this share of all interactions happened."""
    times = np.sort(np.asarray(_clicks(config)["timestamp"].cast("int64")))
    moment = int(times[min(len(times) - 1, int(fraction * len(times)))]) // 1_000_000
    return f"{np.datetime64(moment, 's')}Z"


def _clicks(config: NightConfig) -> Any:
    return pq.read_table(config.path("interactions.parquet"))


def retrain(config: NightConfig, *, seed: int, data_until: str) -> None:
    """Train another bundle in place of the first."""
    reference = replace(config.reference, seed=seed)
    train_reference(replace(config, reference=reference), data_until=data_until)


def make_bench(folder: Path, redis_url: str, *, seed: int, users: int, items: int) -> Bench:
    """Make a published night, its successor, and a night of the same sizes whose users clicked at random."""
    config = prepare(folder / "ours", redis_url, seed=seed, users=users, items=items)
    live = publish_night(config, cut_at(config, 0.85))
    generation = build(config, cut_at(config, 0.9))
    pin(config, generation)  # what a test refuses would go when another begins a night
    pristine_folder = folder / "kept"
    shutil.copytree(config.store().local(f"generations/{generation}"), pristine_folder)
    theirs = replace(config, base=str(folder / "theirs"), namespace=f"{config.namespace}-theirs")
    clicks = synthesize(WorldSettings(user_count=users, item_count=items, seed=seed))
    # Keep the share of known items that our data has, within the training rows and within the rest.
    items_of, until_us = (clicks.item_rows.copy(), int(parse_time(DATA_UNTIL).timestamp() * 1_000_000))
    for rows in (np.flatnonzero(clicks.times_us < until_us), np.flatnonzero(clicks.times_us >= until_us)):
        items_of[rows] = items_of[np.random.default_rng(seed).permutation(rows)]
    (folder / "theirs").mkdir()
    write_clicks(folder / "theirs", replace(clicks, item_rows=items_of))
    train_reference(theirs, data_until=DATA_UNTIL)
    other_generation_id = build(theirs, cut_at(theirs, 0.9))
    return Bench(config, generation, pristine_folder, theirs.store().local(f"generations/{other_generation_id}"), live)
