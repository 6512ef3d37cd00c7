"""Base of a night: an earlier generation whose records may be copied, in how far it fits, and its shards.

Its parts raise CannotCopy, or an error about a damaged file; `prior.PriorIndex` alone handles both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from cache.control.states import State
from cache.errors import CorruptArtefact, LarderError, StoreError
from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from cache.format.manifest import GENERATION, Artefact, Manifest, SeenPart, Table
from cache.model.tower import Histories
from cache.records import ABSENT_FLAGS
from cache.store.artefacts import fetch_checked, generation_path
from precompute.builds.build import Build, settings_digest
from precompute.builds.reports import (
    BEGIN_REPORT,
    NO_BASE_ENTRY,
    BeginReport,
    EmbedItemsReport,
    ReportName,
    ReportT,
    shard_report_name,
)
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import NightConfig
from precompute.partitions.digests import Digests
from precompute.releases.release_log import Releases
from precompute.scoring.copies import HASH_AND_DIGEST, AllowedItems, PublishedInputs

VERIFIED_STATES: Final = frozenset(
    {State.VERIFIED, State.LIVE, State.SUPERSEDED, State.ROLLED_BACK}
)
"""States of a generation whose gates have passed; one that was rolled back holds what its inputs gave all the same."""

REUSE_OFF, NO_VERIFIED_BASE, OTHER_SETTINGS, OTHER_BUNDLE = (
    "[night] reuse is off",
    "there is no verified generation to copy from",
    "other settings than the last nights'",
    "another bundle than the last nights'",
)


class CannotCopy(Exception):
    """Some data of the base cannot be copied, for the reason that is the message; it is read or computed instead."""


OTHER_PROGRAMS: Final = "other programs or another device computed it"


@dataclass(frozen=True, eq=False)  # no slots: the item table is kept beside the fields
class BaseGeneration:
    """A verified generation of the same settings; `has_lists`: also of the same bundle, so all its tables count."""

    build: Build
    begin_report: BeginReport
    manifest: Manifest
    has_lists: bool

    def demand_changes(self, embed_report: EmbedItemsReport) -> None:
        """Raise CannotCopy without changes of the items since this base."""
        if not self.has_changes(embed_report):
            raise CannotCopy("items were not compared with those of this base")

    def has_changes(self, embed_report: EmbedItemsReport) -> bool:
        """Whether `embed_items`, by its report, wrote how this night's items differ from this base's.

        A `begin` that ends late may have chosen another base since: numbers of items would mean others.
        """
        return (
            bool(embed_report["changes"]) and embed_report.get("base") == self.manifest.generation
        )

    @classmethod
    def open(cls, config: NightConfig, begin_report: BeginReport) -> Self | None:
        """Open the base that `begin` chose, by its report; None if it chose none, or the base can no longer be used."""
        base_entry = begin_report.get("base") or NO_BASE_ENTRY
        generation = base_entry["generation"]
        generation_parts = None if generation is None else _read_generation(config, generation)
        if generation_parts is None:
            return None
        return cls(*generation_parts, has_lists=base_entry["has_lists"])

    @property
    def generation(self) -> str:
        """Id of the base generation."""
        return self.manifest.generation

    @cached_property
    def items(self) -> ItemTable:
        """Item table of the base with vectors, verified once; raises CorruptArtefact for a file that differs."""
        files = self.manifest.items
        for artefact in (files.ids, files.offsets, files.vectors, files.model_index):
            self.fetch(artefact)
        for part in self.manifest.entity_sets["item"].parts:
            self.fetch(part.file)
        return ItemTable.open(self.build.root, self.manifest)

    def demand_dims(self, dims: int) -> None:
        """Raise CannotCopy if its items have vectors of another length."""
        if self.manifest.items.dims != dims:
            raise CannotCopy("its vectors have another length")

    def fetch(self, artefact: Artefact) -> Path:
        """Fetch a file of the base; raise CorruptArtefact if it differs from the manifest or a report."""
        return fetch_checked(self.build.store, self.generation, artefact)

    def fetch_noted(self, name: str) -> Path:
        """Fetch a file by its checksum in the report of `begin`; raise CorruptArtefact if unlisted or different."""
        file_entry = self.begin_report.get("kept", {}).get(name)
        if file_entry is None:
            raise CorruptArtefact(f"{self.generation} has no {name}", path=name)
        return self.fetch(Artefact(name, **file_entry))

    def report(self, name: ReportName[ReportT]) -> ReportT | None:
        """Report of a step of it, None if there is none; raises CorruptArtefact for one that cannot be read."""
        try:
            return self.build.read_report(name)
        except StoreError:
            raise
        except (LarderError, ValueError) as error:
            raise CorruptArtefact(
                f"work/{name}.json of {self.generation} cannot be read: {error}", path=name
            ) from error

    def allowed_by_table(self, allowed_items: AllowedItems) -> Mapping[str, NDArray[np.bool_]]:
        """Return masks of the items that its lists drew from; raise CorruptArtefact for a damaged attribute."""
        for attribute in self.manifest.items.attributes.values():
            for artefact in attribute.parts().values():
                self.fetch(artefact)
        return allowed_items(self.build)

    def has_model(self, model: BundleModel) -> bool:
        """True if the base's bundle had this model with the same inputs: the same columns, as long a history."""
        base_model = self.manifest.models.get(model.name)
        if base_model is None or base_model.digest != model.digest:
            return False
        return base_model.spec == model.spec.to_json()


def choose_base(
    releases: Releases, config: NightConfig, bundle: Bundle, *, making: str
) -> tuple[BaseGeneration | None, str]:
    """(the base, why not all of it can be copied): the newest verified generation of the same bundle and settings.

    Where none is of the same bundle, the newest of the same settings: vectors of items and values may still fit.
    """
    if config.reuse == "off":
        return None, REUSE_OFF
    config_digest, fallback_base, has_verified = settings_digest(config), None, False
    ledger, rows = releases.ledger(), releases.control.rows()
    stored_ids = sorted(
        filter(GENERATION.fullmatch, releases.store.names("generations")), reverse=True
    )
    for generation in stored_ids:
        row = rows.get(generation)
        state = ledger.state(generation) or (row and row.state)
        if generation == making or state not in VERIFIED_STATES:
            continue
        has_verified = True
        generation_parts = _read_generation(config, generation)
        if generation_parts is None or generation_parts[1].get("settings") != config_digest:
            continue
        base = BaseGeneration(
            *generation_parts, has_lists=generation_parts[1]["bundle_digest"] == bundle.digest
        )
        if base.has_lists:
            return base, ""
        fallback_base = fallback_base or base
    if fallback_base is not None:
        return fallback_base, OTHER_BUNDLE
    return None, OTHER_SETTINGS if has_verified else NO_VERIFIED_BASE


def _read_generation(
    config: NightConfig, generation: str
) -> tuple[Build, BeginReport, Manifest] | None:
    """A generation's build, report and manifest; None where one of them is gone, damaged or of another Larder."""
    build = Build(config, config.store(), generation)
    try:
        begin_report = build.read_report(BEGIN_REPORT)
        raw = build.store.read(generation_path(generation, "manifest.json"))
        if begin_report is None or raw is None:
            return None
        return build, begin_report, Manifest.from_bytes(raw)
    except StoreError:
        raise
    except (LarderError, ValueError):
        return None


@dataclass(frozen=True, slots=True, eq=False)
class BaseShard:
    """Users of one shard of the base, each with a digest, and the records of those that have any.

    `base_positions` int64 [users] are the positions of their records, -1 without one; `tables` are records by table,
    `has_all_tables` a mask [records] of the users with an answer in every table.
    """

    pairs: NDArray[Any]
    base_positions: NDArray[np.int64]
    tables: Mapping[str, NDArray[Any]]
    has_all_tables: NDArray[np.bool_]
    published: PublishedInputs | None = None

    @classmethod
    def open(
        cls, base: BaseGeneration, shard: int, tables: Mapping[str, Table], computed_by: str
    ) -> Self:
        """Open the base's shard and verify every file."""
        name = shard_report_name(shard)
        report = base.report(name)
        if report is None or report.get("computed_by") != computed_by:
            raise CannotCopy(OTHER_PROGRAMS)
        try:
            users = report["users"]
            if users.get("short"):
                raise CannotCopy("lists of the base are short")
            inputs, directory_file = Artefact(**users["inputs"]), Artefact(**users["directory"])
            published_files = [Artefact(**file_entry) for file_entry in users["seen"]]
            seen_part = SeenPart.of(published_files) if published_files else None
        except (KeyError, TypeError) as error:
            raise CorruptArtefact(f"work/{name}.json of {base.generation}", path=name) from error
        pairs = map_file(base.fetch(inputs), "<u8").view(HASH_AND_DIGEST)
        directory = map_file(base.fetch(directory_file), "<u8")
        records = {name: table_records(base, shard, table) for name, table in tables.items()}
        published = None if seen_part is None else _published_inputs(base, seen_part)
        at = np.minimum(directory.searchsorted(pairs["hash"]), max(0, len(directory) - 1))
        has_record = (
            directory[at] == pairs["hash"] if len(directory) else np.zeros(len(pairs), np.bool_)
        )
        is_complete = np.ones(len(directory), np.bool_)
        for stored_records in records.values():
            is_complete &= stored_records["flags"] != ABSENT_FLAGS
        return cls(pairs, np.where(has_record, at, -1), records, is_complete, published)

    def between(self, hashes: range) -> slice:
        """Users whose hashes are in a range."""
        user_hashes = self.pairs["hash"]
        return slice(_first_at(user_hashes, hashes.start), _first_at(user_hashes, hashes.stop))

    def find(self, hashes: Digests) -> NDArray[np.int64]:
        """int64 [n]: which of the users has each hash, -1 for none."""
        user_hashes = self.pairs["hash"]
        if not len(user_hashes):
            return np.full(len(hashes), -1)
        at = np.minimum(user_hashes.searchsorted(hashes), len(user_hashes) - 1)
        return np.where(user_hashes[at] == hashes, at, -1)


def _first_at(hashes: Digests, bound: int) -> int:
    return len(hashes) if bound >= 1 << 64 else int(hashes.searchsorted(np.uint64(bound)))


def table_records(base: BaseGeneration, shard: int, table: Table) -> NDArray[Any]:
    """Records of one shard of a table of the base; raises CorruptArtefact for a damaged file."""
    part = table.parts[shard]
    path = base.fetch(part.file)
    if not part.count:
        return np.empty(0, table.layout.dtype)
    return np.asarray(np.memmap(path, table.layout.dtype, "r", shape=(part.count,)))


def _published_inputs(base: BaseGeneration, part: SeenPart) -> PublishedInputs:
    """Open the inputs that the base published for users with records."""

    def rows(ends: Artefact, values: Artefact, kind: str) -> Histories:
        row_ends = map_file(base.fetch(ends), "<u8").astype(np.int64)
        return Histories(np.concatenate([[0], row_ends]), map_file(base.fetch(values), kind))

    return PublishedInputs(
        rows(part.ends, part.items, "<u4"),
        None if part.times is None else rows(part.ends, part.times, "<i8"),
        None
        if part.features is None or part.feature_ends is None
        else rows(part.feature_ends, part.features, "u1"),
        None if part.brought is None else map_file(base.fetch(part.brought), "u1").view(np.bool_),
    )
