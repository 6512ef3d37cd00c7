"""The base of a night: an earlier generation whose records may be copied, and in how far it fits."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, LarderError, StoreError
from cache.format.item_table import ItemTable
from cache.format.manifest import GENERATION, Manifest
from cache.format.manifest_files import Artefact
from cache.store.artefacts import fetch_checked, generation_path
from precompute.builds.build import Build
from precompute.builds.filtered_items import allowed_items
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import NightConfig
from precompute.control.states import State
from precompute.releases.release_log import ReleaseLog

VERIFIED: Final = frozenset({State.VERIFIED, State.LIVE, State.SUPERSEDED, State.ROLLED_BACK})
"""States of a generation whose gates have passed; one that was rolled back holds what its inputs gave all the same."""

OFF, NONE, SETTINGS, BUNDLE = (
    "[night] reuse is off",
    "there is no verified generation to copy from",
    "other settings than the last nights'",
    "another bundle than the last nights'",
)


def settings_digest(config: NightConfig) -> str:
    """Digest of the settings that decide what a generation holds."""
    return hashlib.sha256(config.semantic()).hexdigest()


@dataclass(frozen=True, eq=False)  # no slots: the item table is kept beside the fields
class BaseGeneration:
    """A verified generation of the same settings; `has_lists`: also of the same bundle, so all its tables count."""

    build: Build
    begin_report: Mapping[str, Any]
    manifest: Manifest
    has_lists: bool

    def has_changes(self, embedded: Mapping[str, Any]) -> bool:
        """Whether `embed_items`, by its report, wrote how this night's items differ from this base's.

        A `begin` that ends late may have chosen another base since: numbers of items would mean others.
        """
        return bool(embedded["changes"]) and embedded.get("base") == self.manifest.generation

    @classmethod
    def open(cls, config: NightConfig, begin_report: Mapping[str, Any]) -> Self | None:
        """The base that `begin` chose, by its report; None where it chose none, or what is left of it does not do."""
        base_entry = begin_report.get("base") or {}
        generation = base_entry.get("generation")
        generation_parts = None if generation is None else _read(config, str(generation))
        if generation_parts is None:
            return None
        return cls(*generation_parts, has_lists=bool(base_entry["has_lists"]))

    @property
    def generation(self) -> str:
        """Its id."""
        return self.manifest.generation

    @cached_property
    def items(self) -> ItemTable:
        """Its item table with vectors, verified once; raises CorruptArtefact for a file that is not as it should be."""
        files = self.manifest.items
        for artefact in (files.ids, files.offsets, files.vectors, files.model_index):
            self.fetch(artefact)
        for part in self.manifest.entity_sets["item"].parts:
            self.fetch(part.file)
        return ItemTable.open(self.build.root, self.manifest)

    def fetch(self, artefact: Artefact) -> Path:
        """A file of it on this host; raises CorruptArtefact where it is not what the manifest or a report says."""
        return fetch_checked(self.build.store, self.generation, artefact)

    def fetch_noted(self, name: str) -> Path:
        """A file that the report of `begin` lists with its checksum; raises CorruptArtefact likewise."""
        file_entry = self.begin_report.get("kept", {}).get(name)
        if file_entry is None:
            raise CorruptArtefact(f"{self.generation} has no {name}", path=name)
        return self.fetch(Artefact(name, **file_entry))

    def report(self, name: str) -> Mapping[str, Any]:
        """Report of a step of it, empty if there is none; raises CorruptArtefact for one that cannot be read."""
        try:
            return self.build.read_report(name) or {}
        except StoreError:
            raise
        except (LarderError, ValueError) as error:
            raise CorruptArtefact(
                f"work/{name}.json of {self.generation} cannot be read: {error}", path=name
            ) from error

    def allowed_items(self) -> dict[str, NDArray[np.bool_]]:
        """Items that its lists under filters were of, by table; raises CorruptArtefact for a damaged attribute."""
        for attribute in self.manifest.items.attributes.values():
            for artefact in attribute.parts().values():
                self.fetch(artefact)
        return allowed_items(self.build)

    def has_model(self, model: BundleModel) -> bool:
        """True if its bundle had this model, fed in the same way: from the same columns, as long a history."""
        base_model = self.manifest.models.get(model.name)
        if base_model is None or base_model.digest != model.digest:
            return False
        return base_model.spec == model.spec.to_json()


def choose_base(
    releases: ReleaseLog, config: NightConfig, bundle: Bundle, *, making: str
) -> tuple[BaseGeneration | None, str]:
    """(the base, why not all of it can be copied): the newest verified generation of the same bundle and settings.

    Where none is of the same bundle, the newest of the same settings: vectors of items and values may still fit.
    """
    if config.reuse == "off":
        return None, OFF
    config_digest, fallback_base, has_verified = settings_digest(config), None, False
    ledger, rows = releases.ledger(), releases.control.rows()
    stored_ids = sorted(
        filter(GENERATION.fullmatch, releases.store.names("generations")), reverse=True
    )
    for generation in stored_ids:
        row = rows.get(generation)
        state = ledger.state(generation) or (row and row.state)
        if generation == making or state not in VERIFIED:
            continue
        has_verified = True
        generation_parts = _read(config, generation)
        if generation_parts is None or generation_parts[1].get("settings") != config_digest:
            continue
        base = BaseGeneration(
            *generation_parts, has_lists=generation_parts[1]["bundle_digest"] == bundle.digest
        )
        if base.has_lists:
            return base, ""
        fallback_base = fallback_base or base
    if fallback_base is not None:
        return fallback_base, BUNDLE
    return None, SETTINGS if has_verified else NONE


def _read(config: NightConfig, generation: str) -> tuple[Build, Mapping[str, Any], Manifest] | None:
    """A generation's build, report and manifest; None where one of them is gone, damaged or of another Larder."""
    build = Build(config, config.store(), generation)
    try:
        begin_report = build.read_report("begin")
        raw = build.store.read(generation_path(generation, "manifest.json"))
        if begin_report is None or raw is None:
            return None
        return build, begin_report, Manifest.from_bytes(raw)
    except StoreError:
        raise
    except (LarderError, ValueError):
        return None
