"""A shard of the base: whose inputs it was made from, and the records that may be copied."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.format.directory import map_file
from cache.format.manifest import Table
from cache.format.manifest_files import Artefact, SeenPart
from cache.format.records.layout import ABSENT
from cache.model.tower import Histories
from precompute.builds.build import shard_report
from precompute.reuse.base import BaseGeneration
from precompute.reuse.digests import Digests

PAIR = np.dtype([("hash", "<u8"), ("digest", "<u8")])
"""A user and the digest of the input: 16 bytes for each, in hash order."""


def inputs_file(shard: int) -> str:
    """Path of the digests of a shard's users."""
    return f"work/inputs/{shard:04d}.u64"


def reasons_file(shard: int) -> str:
    """Path of the reasons for which a shard's records were computed, or copied: a byte each, in hash order."""
    return f"work/reasons/{shard:04d}.u1"


@dataclass(frozen=True, slots=True, eq=False)
class BaseShard:
    """Users of one shard of the base, each with a digest, and the records of those that have any.

    `base_positions` int64 [users] is where each one's records lie, -1 for who has none; `tables` are records by table,
    `has_all_tables` a mask [records] of the users with an answer in every table.
    """

    pairs: NDArray[Any]
    base_positions: NDArray[np.int64]
    tables: Mapping[str, NDArray[Any]]
    has_all_tables: NDArray[np.bool_]
    seen_items: Histories | None = None
    """Items that users with records had, where filters or events ask for it."""
    times: Histories | None = None
    """Times of these items, where events are taken in; `feature_json`: what else the user tower was given."""
    feature_json: Histories | None = None
    has_own_vector: NDArray[np.uint8] | None = None
    """1 for each who brought a vector along, where users may, and events are taken in."""

    @classmethod
    def open(
        cls, base: BaseGeneration, shard: int, tables: Mapping[str, Table], computed_by: str
    ) -> Self | None:
        """The base's shard, every file verified; None where one is damaged or gone, or other programs made it."""
        try:
            report = base.report(shard_report(shard))
            users = report.get("users", {})
            if report.get("computed_by") != computed_by or users.get("short"):
                return None
            pairs = map_file(base.fetch(Artefact(**users["inputs"])), "<u8").view(PAIR)
            directory = map_file(base.fetch(Artefact(**users["directory"])), "<u8")
            records = {name: table_records(base, shard, table) for name, table in tables.items()}
            published = _published(base, users["seen"])
        except (CorruptArtefact, UnknownGeneration, FileNotFoundError, KeyError, TypeError):
            return None
        at = np.minimum(directory.searchsorted(pairs["hash"]), max(0, len(directory) - 1))
        has_record = (
            directory[at] == pairs["hash"] if len(directory) else np.zeros(len(pairs), np.bool_)
        )
        is_complete = np.ones(len(directory), np.bool_)
        for stored_records in records.values():
            is_complete &= stored_records["flags"] != ABSENT
        return cls(pairs, np.where(has_record, at, -1), records, is_complete, **published)

    def between(self, hashes: range) -> slice:
        """Users whose hashes are in a range."""
        user_hashes = self.pairs["hash"]
        return slice(_first(user_hashes, hashes.start), _first(user_hashes, hashes.stop))

    def find(self, hashes: Digests) -> NDArray[np.int64]:
        """int64 [n]: which of the users has each hash, -1 for none."""
        user_hashes = self.pairs["hash"]
        if not len(user_hashes):
            return np.full(len(hashes), -1)
        at = np.minimum(user_hashes.searchsorted(hashes), len(user_hashes) - 1)
        return np.where(user_hashes[at] == hashes, at, -1)


def _first(hashes: Digests, bound: int) -> int:
    return len(hashes) if bound >= 1 << 64 else int(hashes.searchsorted(np.uint64(bound)))


def table_records(base: BaseGeneration, shard: int, table: Table) -> NDArray[Any]:
    """Records of one shard of a table of the base; raises CorruptArtefact for a damaged file."""
    part = table.parts[shard]
    path = base.fetch(part.file)
    if not part.count:
        return np.empty(0, table.layout.dtype)
    return np.asarray(np.memmap(path, table.layout.dtype, "r", shape=(part.count,)))


def _published(base: BaseGeneration, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of what the base published of the users with records; None for what it did not."""
    if not files:
        return {}
    part = SeenPart.of(Artefact(**file_entry) for file_entry in files)

    def mapped(file: Artefact | None, kind: str) -> NDArray[Any] | None:
        return None if file is None else map_file(base.fetch(file), kind)

    def rows(ends: Artefact | None, values: Artefact | None, kind: str) -> Histories | None:
        mapped_values, where = mapped(values, kind), mapped(ends, "<u8")
        return (
            None
            if mapped_values is None or where is None
            else Histories(_starting(where), mapped_values)
        )

    return {
        "seen_items": rows(part.ends, part.items, "<u4"), "times": rows(part.ends, part.times, "<i8"),
        "feature_json": rows(part.feature_ends, part.features, "u1"), "has_own_vector": mapped(part.brought, "u1"),
    }  # fmt: skip


def _starting(ends: Digests) -> NDArray[np.int64]:
    return np.concatenate([[0], ends.astype(np.int64)])
