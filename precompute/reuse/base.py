"""Base of a night: an earlier generation whose records may be copied, what of it can be used, and its shards.

Its parts raise CannotCopy, or an error about a damaged file; only `prior.PriorIndex` handles both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from cache.control.states import GenerationState
from cache.errors import CorruptArtefact, LarderError, StoreError
from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from cache.format.manifest import GENERATION_PATTERN, Artefact, Manifest, SeenPart, Table
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
from precompute.scoring.copies import HASH_AND_DIGEST, AllowedItemsFunction, PublishedInputs

VERIFIED_STATES: Final = frozenset(
    {GenerationState.VERIFIED, GenerationState.LIVE, GenerationState.SUPERSEDED, GenerationState.ROLLED_BACK}
)
"""States of a generation whose gates have passed; the records of a rolled-back one are still correct for its inputs."""

REUSE_OFF_REASON, NO_VERIFIED_BASE_REASON, OTHER_SETTINGS_REASON, OTHER_BUNDLE_REASON = (
    "[night] reuse is off",
    "there is no verified generation to copy from",
    "the settings differ from those of earlier nights",
    "the bundle differs from those of earlier nights",
)


class CannotCopy(Exception):
    """Some data of the base cannot be copied, for the reason in the message, and is read or computed instead."""


OTHER_PROGRAMS_REASON: Final = "it was computed by other programs or another device"


@dataclass(frozen=True, eq=False)  # no slots: `cached_property` needs a `__dict__`
class BaseGeneration:
    """Verified generation with the same settings; `has_lists`: with the same bundle, so lists may be copied."""

    build: Build
    begin_report: BeginReport
    manifest: Manifest
    has_lists: bool

    def demand_changes(self, embed_report: EmbedItemsReport) -> None:
        """Raise CannotCopy unless `embed_items` compared this night's items with this base's."""
        if not self.has_changes(embed_report):
            raise CannotCopy("this night's items were not compared with this base's")

    def has_changes(self, embed_report: EmbedItemsReport) -> bool:
        """True if `embed_items` wrote, by its report, how this night's items differ from this base's.

        A late attempt of `begin` may have chosen another base since, whose ordinals mean other items.
        """
        return bool(embed_report["changes"]) and embed_report.get("base") == self.manifest.generation

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
        """Item table of the base with vectors, checked once; raises CorruptArtefact for a file that differs."""
        item_files = self.manifest.items
        for artefact in (item_files.ids, item_files.offsets, item_files.vectors, item_files.model_index):
            self.fetch(artefact)
        for part in self.manifest.entity_sets["item"].parts:
            self.fetch(part.file)
        return ItemTable.open(self.build.root, self.manifest)

    def demand_dims(self, dims: int) -> None:
        """Raise CannotCopy if the base's item vectors have another length."""
        if self.manifest.items.dims != dims:
            raise CannotCopy("its item vectors have another length")

    def fetch(self, artefact: Artefact) -> Path:
        """Fetch a file of the base; raise CorruptArtefact if it differs from the manifest or a report."""
        return fetch_checked(self.build.store, self.generation, artefact)

    def fetch_noted(self, file_name: str) -> Path:
        """Fetch a file by its checksum in the report of `begin`; raise CorruptArtefact if unlisted or different."""
        file_entry = self.begin_report.get("kept", {}).get(file_name)
        if file_entry is None:
            raise CorruptArtefact(f"{self.generation} has no {file_name}", path=file_name)
        return self.fetch(Artefact(file_name, **file_entry))

    def report(self, report_name: ReportName[ReportT]) -> ReportT | None:
        """Return a step's report of the base, None if there is none; raise CorruptArtefact if it is unreadable."""
        try:
            return self.build.read_report(report_name)
        except StoreError:
            raise
        except (LarderError, ValueError) as error:
            raise CorruptArtefact(
                f"work/{report_name}.json of {self.generation} cannot be read: {error}", path=report_name
            ) from error

    def read_allowed_by_table(self, allowed_items: AllowedItemsFunction) -> Mapping[str, NDArray[np.bool_]]:
        """Return masks of the items allowed in the base's lists; raise CorruptArtefact for a damaged attribute."""
        for attribute in self.manifest.items.attributes.values():
            for artefact in attribute.file_by_part().values():
                self.fetch(artefact)
        return allowed_items(self.build)

    def has_model(self, model: BundleModel) -> bool:
        """True if the base's bundle had this model with the same inputs: equal columns, equal length of history."""
        base_model = self.manifest.models.get(model.name)
        if base_model is None or base_model.digest != model.digest:
            return False
        return base_model.spec == model.spec.to_json()


def choose_base(
    releases: Releases, config: NightConfig, bundle: Bundle, *, generation_being_made: str
) -> tuple[BaseGeneration | None, str]:
    """Return (base, reason why its lists cannot be copied): the newest verified generation of this bundle and settings.

    Without one of the same bundle, return the newest of the same settings: its item vectors and values may still be
    copied.
    """
    if config.reuse == "off":
        return None, REUSE_OFF_REASON
    config_digest, fallback_base, has_verified = settings_digest(config), None, False
    ledger, row_by_generation = releases.ledger(), releases.control.rows()
    stored_ids = sorted(filter(GENERATION_PATTERN.fullmatch, releases.store.names("generations")), reverse=True)
    for generation in stored_ids:
        row = row_by_generation.get(generation)
        state = ledger.state(generation) or (row and row.state)
        if generation == generation_being_made or state not in VERIFIED_STATES:
            continue
        has_verified = True
        generation_parts = _read_generation(config, generation)
        if generation_parts is None or generation_parts[1].get("settings") != config_digest:
            continue
        base = BaseGeneration(*generation_parts, has_lists=generation_parts[1]["bundle_digest"] == bundle.digest)
        if base.has_lists:
            return base, ""
        fallback_base = fallback_base or base
    if fallback_base is not None:
        return fallback_base, OTHER_BUNDLE_REASON
    return None, OTHER_SETTINGS_REASON if has_verified else NO_VERIFIED_BASE_REASON


def _read_generation(config: NightConfig, generation: str) -> tuple[Build, BeginReport, Manifest] | None:
    """Return a generation's build, report and manifest; None if one is missing, damaged or of another format."""
    build = Build(config, config.store(), generation)
    try:
        begin_report = build.read_report(BEGIN_REPORT)
        manifest_bytes = build.store.read(generation_path(generation, "manifest.json"))
        if begin_report is None or manifest_bytes is None:
            return None
        return build, begin_report, Manifest.from_bytes(manifest_bytes)
    except StoreError:
        raise
    except (LarderError, ValueError):
        return None


@dataclass(frozen=True, slots=True, eq=False)
class BaseShard:
    """Users of one shard of the base with their digests, and the records of those who have any.

    `base_positions` int64 [users] are the positions of the users' records, -1 for a user without records;
    `records_by_table` are records by table; `has_all_tables` [records] is True for users with an answer in every table.
    """

    hash_digest_pairs: NDArray[Any]
    base_positions: NDArray[np.int64]
    records_by_table: Mapping[str, NDArray[Any]]
    has_all_tables: NDArray[np.bool_]
    published: PublishedInputs | None = None

    @classmethod
    def open(cls, base: BaseGeneration, shard: int, tables: Mapping[str, Table], computed_by: str) -> Self:
        """Open the base's shard and check every file; raise CannotCopy if it cannot be used."""
        report_name = shard_report_name(shard)
        report = base.report(report_name)
        if report is None or report.get("computed_by") != computed_by:
            raise CannotCopy(OTHER_PROGRAMS_REASON)
        try:
            users_report = report["users"]
            if users_report.get("short"):
                raise CannotCopy("some lists of the base are shorter than possible")
            digests_artefact, directory_artefact = (
                Artefact(**users_report["inputs"]),
                Artefact(**users_report["directory"]),
            )
            published_files = [Artefact(**file_entry) for file_entry in users_report["seen"]]
            seen_part = SeenPart.of(published_files) if published_files else None
        except (KeyError, TypeError) as error:
            raise CorruptArtefact(f"work/{report_name}.json of {base.generation}", path=report_name) from error
        digest_pairs = map_file(base.fetch(digests_artefact), "<u8").view(HASH_AND_DIGEST)
        directory_hashes = map_file(base.fetch(directory_artefact), "<u8")
        records_by_table = {table_name: read_table_records(base, shard, table) for table_name, table in tables.items()}
        published = None if seen_part is None else _open_published_inputs(base, seen_part)
        nearest_positions = np.minimum(
            directory_hashes.searchsorted(digest_pairs["hash"]), max(0, len(directory_hashes) - 1)
        )
        has_record = (
            directory_hashes[nearest_positions] == digest_pairs["hash"]
            if len(directory_hashes)
            else np.zeros(len(digest_pairs), np.bool_)
        )
        is_complete = np.ones(len(directory_hashes), np.bool_)
        for stored_records in records_by_table.values():
            is_complete &= stored_records["flags"] != ABSENT_FLAGS
        return cls(digest_pairs, np.where(has_record, nearest_positions, -1), records_by_table, is_complete, published)

    def slice_between(self, hashes: range) -> slice:
        """Return the slice of the users whose hashes are in a range."""
        user_hashes = self.hash_digest_pairs["hash"]
        return slice(_first_position(user_hashes, hashes.start), _first_position(user_hashes, hashes.stop))

    def find_rows(self, hashes: Digests) -> NDArray[np.int64]:
        """Return int64 [n], the row of the user with each hash, -1 if there is none."""
        user_hashes = self.hash_digest_pairs["hash"]
        if not len(user_hashes):
            return np.full(len(hashes), -1)
        nearest_rows = np.minimum(user_hashes.searchsorted(hashes), len(user_hashes) - 1)
        return np.where(user_hashes[nearest_rows] == hashes, nearest_rows, -1)


def _first_position(hashes: Digests, bound: int) -> int:
    return len(hashes) if bound >= 1 << 64 else int(hashes.searchsorted(np.uint64(bound)))


def read_table_records(base: BaseGeneration, shard: int, table: Table) -> NDArray[Any]:
    """Return the records of one shard of a table of the base; raise CorruptArtefact for a damaged file."""
    part = table.parts[shard]
    path = base.fetch(part.file)
    if not part.count:
        return np.empty(0, table.layout.dtype)
    return np.asarray(np.memmap(path, table.layout.dtype, "r", shape=(part.count,)))


def _open_published_inputs(base: BaseGeneration, part: SeenPart) -> PublishedInputs:
    """Open the inputs that the base published for users with records."""

    def rows(ends_artefact: Artefact, values_artefact: Artefact, dtype: str) -> Histories:
        row_ends = map_file(base.fetch(ends_artefact), "<u8").astype(np.int64)
        return Histories(np.concatenate([[0], row_ends]), map_file(base.fetch(values_artefact), dtype))

    return PublishedInputs(
        rows(part.ends, part.items, "<u4"),
        None if part.times is None else rows(part.ends, part.times, "<i8"),
        None if part.features is None or part.feature_ends is None else rows(part.feature_ends, part.features, "u1"),
        None if part.brought is None else map_file(base.fetch(part.brought), "u1").view(np.bool_),
    )
