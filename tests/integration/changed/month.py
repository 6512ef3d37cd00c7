"""A month of nights that copy unchanged records, each with a full night over the same inputs."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache.format.manifest import EntityKind
from cache.store.artefacts import generation_path
from cache.store.erasures import request_erasure
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT, shard_report_name
from precompute.config.settings import NightConfig
from precompute.steps import begin, embed_items, score
from tests.integration import nights

COMPARED = ("tables", "directory", "items", "seen")
"""Folders of a generation that must have the same bytes, beside the defaults."""
REPORTED_FIELDS = (
    "users",
    "interactions",
    "unknown_items",
    "late",
    "user_seed",
    "item_seed",
    "unusable",
    "items_without_vector",
)
SHARD_SAID = ("entities", "scored", "without_input", "short", "unusable")
FIRST = datetime.fromisoformat(nights.DATA_UNTIL)


@dataclass(slots=True)
class Month:
    """Inputs that change from night to night, and two configurations of the same nights over them."""

    config: NightConfig
    full: NightConfig
    rng: np.random.Generator
    night: int = 0
    removed_items: list[dict[str, Any]] = field(default_factory=list)
    generations: list[str] = field(default_factory=list)
    """Generations that were published, the newest last."""

    @classmethod
    def of(cls, config: NightConfig, full_redis: str, seed: int) -> "Month":
        """Make a month from what `nights.prepare` wrote, with its interactions cut off at the first night."""
        folder = config.path("interactions")
        folder.mkdir()
        all_interactions = pq.read_table(config.path("interactions.parquet"))
        first = all_interactions.filter(
            pc.less(all_interactions["timestamp"], pa.scalar(FIRST, all_interactions["timestamp"].type))
        )
        pq.write_table(first, folder / "day-000.parquet")
        config = replace(config, sources=replace(config.sources, interactions=("interactions",)))
        full = replace(config, artifacts="full", state="full-state", redis_url=full_redis, reuse="off")
        return cls(config, full, np.random.default_rng(seed))

    @property
    def cut(self) -> datetime:
        """The cut of the next night."""
        return FIRST + timedelta(days=self.night)

    def file(self, night: int) -> Path:
        """Path of the interactions of the day before a night."""
        return self.config.path(f"interactions/day-{night:03d}.parquet")

    def ids(self, name: str) -> list[str]:
        """Return the users of the first day, or the items of the catalogue."""
        if name == "user":
            return sorted(set(pq.read_table(self.file(0))["user"].to_pylist()))
        item_ids: list[str] = pq.read_table(self.config.path("items.parquet"))["item"].to_pylist()
        return item_ids

    def configure(self, **changes: Any) -> None:
        """Change settings of both kinds of nights."""
        self.config, self.full = (replace(night_config, **changes) for night_config in (self.config, self.full))

    def clicks(
        self,
        users: Sequence[str | None],
        items: Sequence[str],
        *,
        at: Sequence[datetime] | None = None,
        file: Path | None = None,
    ) -> None:
        """Write one file of a day's interactions."""
        start = self.cut - timedelta(days=1)
        times = at or [
            start + timedelta(seconds=int(offset_s)) for offset_s in self.rng.integers(86_400, size=len(users))
        ]
        kind = pq.read_schema(self.file(0)).field("timestamp").type
        table = pa.table({"user": users, "item": items, "timestamp": pa.array(times, kind)})
        pq.write_table(table, file or self.file(self.night))

    def a_day(self, active_fraction: float = 0.1, new_users: int = 1) -> None:
        """Let a tenth of the users click on a few items, both drawn by Zipf's law."""
        users, items = self.ids("user"), self.ids("item")
        weights = 1 / np.arange(1, len(users) + 1)
        active = self.rng.choice(
            users, max(1, int(active_fraction * len(users))), replace=False, p=weights / weights.sum()
        )
        rows = [
            (user, items[int(len(items) * self.rng.random() ** 2)])
            for user in active
            for _ in range(self.rng.integers(1, 4))
        ]
        rows += [(f"new-{self.night}-{number}", items[0]) for number in range(new_users)]
        self.clicks([user for user, _ in rows], [item for _, item in rows])

    def lose_items(self, count: int) -> None:
        """Remove items from the catalogue."""
        table = pq.read_table(self.config.path("items.parquet"))
        rows = self.rng.choice(len(table), count, replace=False)
        self.removed_items += table.take(pa.array(rows)).to_pylist()
        kept_rows = np.setdiff1d(np.arange(len(table)), rows)
        pq.write_table(table.take(pa.array(kept_rows)), self.config.path("items.parquet"))

    def bring_items_back(self, count: int) -> None:
        """Add removed items again."""
        table = pq.read_table(self.config.path("items.parquet"))
        back, self.removed_items = self.removed_items[:count], self.removed_items[count:]
        if back:
            more = pa.Table.from_pylist(back, schema=table.schema)
            pq.write_table(pa.concat_tables([table, more]), self.config.path("items.parquet"))

    def shorten(self, night: int) -> None:
        """Remove a third of the rows of an earlier day."""
        table = pq.read_table(self.file(night))
        is_kept = self.rng.random(len(table)) > 0.3
        pq.write_table(table.filter(pa.array(is_kept)), self.file(night))

    def erase(self, name: str, kind: EntityKind) -> None:
        """Request an erasure."""
        for config in (self.config, self.full):
            request_erasure(config.store(), name.encode(), kind, requested_at=0.0)

    def publish(self) -> str:
        """Run and publish the night that copies; return its generation."""
        self.generations.append(nights.publish_night(self.config, self.cut.isoformat()))
        return self.generations[-1]

    def score(self) -> str:
        """Run the night that copies, up to its pages."""
        return scored(self.config, self.cut)

    def compute(self) -> str:
        """Run the full night, up to its pages."""
        return scored(self.full, self.cut)

    def build(self, generation: str) -> Build:
        """Return a generation of the nights that copy."""
        return Build(self.config, self.config.store(), generation)

    def differences(self, generation: str, full: str) -> list[str]:
        """Return all differences of two generations."""
        if generation != full:
            return [f"{generation} is not {full}"]
        copying_build, theirs = (
            Build(night_config, night_config.store(), generation) for night_config in (self.config, self.full)
        )
        difference_lines = [
            name
            for name in files_of(copying_build.root, theirs.root)
            if not same_file(copying_build.root / name, theirs.root / name)
        ]
        begin_report, full_begin_report = (copying_build.need_report(BEGIN_REPORT), theirs.need_report(BEGIN_REPORT))
        difference_lines += compare_reports("begin", begin_report, full_begin_report, REPORTED_FIELDS)
        for shard in range(self.config.shards):
            mine, full_report = (build.need_report(shard_report_name(shard)) for build in (copying_build, theirs))
            difference_lines += compare_reports(f"shard {shard}", mine["users"], full_report["users"], SHARD_SAID)
            difference_lines += compare_reports(
                f"items {shard}", mine["items"], full_report["items"], ("scored", "unusable")
            )
        return difference_lines

    def reasons(self, generation: str) -> dict[str, int]:
        """Return the numbers of users by reason."""
        build = self.build(generation)
        count_by_reason: dict[str, int] = {}
        for shard in range(self.config.shards):
            users = build.need_report(shard_report_name(shard))["users"]
            for name, count in (users["reasons"] or {"all": users["scored"]}).items():
                count_by_reason[name] = count_by_reason.get(name, 0) + count
        return count_by_reason


def scored(config: NightConfig, cut: datetime) -> str:
    """Run a night with this cut up to its pages; return its generation."""
    build = begin.run(config, data_until=cut.isoformat(), run_after=None)
    embed_items.run(config, build)
    score.run(config, build, build["shards"])
    return str(build["generation"])


def files_of(*roots: Path) -> Iterator[str]:
    """Return the files of a generation that are compared, by name."""
    names = {"defaults.json"}
    for root in roots:
        for folder in COMPARED:
            names |= {
                path.relative_to(root).as_posix()
                for path in (root / folder).rglob("*")
                if path.is_file() and path.suffix != ".part"  # what a kill leaves, a sweep removes
            }
    yield from sorted(names)


def same_file(copied_path: Path, theirs: Path) -> bool:
    """Return whether both files exist with the same bytes."""
    return copied_path.is_file() and theirs.is_file() and copied_path.read_bytes() == theirs.read_bytes()


def compare_reports(
    where: str, copied_report: Mapping[str, Any], theirs: Mapping[str, Any], names: tuple[str, ...]
) -> list[str]:
    """Differences of two reports in these fields."""
    return [
        f"{where}: {name} is {copied_report.get(name)}, in full {theirs.get(name)}"
        for name in names
        if copied_report.get(name) != theirs.get(name)
    ]


def spoil(config: NightConfig, generation: str, name: str) -> None:
    """Flip a bit of a generation's file on disk."""
    path = config.store().local(generation_path(generation, name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    draft_path = path.with_suffix(".spoilt")
    draft_path.write_bytes(data)
    shutil.move(draft_path, path)
