"""Worlds with a published base and changed inputs, made once and copied for each following night."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from cache.control.control_keys import Control
from cache.format.item_table import ItemTable
from precompute.builds.build import Build
from precompute.builds.reports import (
    BEGIN_REPORT,
    INDEX_REPORT,
    QUANTIZE_REPORT,
    IndexReport,
    QuantizeReport,
    file_entry,
    shard_report_name,
)
from precompute.builds.seal import write_manifest
from precompute.features import scoring_hooks
from precompute.gates.evidence.candidate import Candidate, Measurement
from precompute.partitions.catalogue import open_items
from precompute.partitions.digests import Digests
from precompute.partitions.shard_files import PARTITION_FOLDER
from precompute.partitions.shard_input import ShardInput, read_shard
from precompute.reuse.identity import identity
from precompute.scoring.copies import inputs_path, pair_with_digests
from precompute.steps import assemble
from tests.integration.changed.events import Event
from tests.integration.changed.month import Month


@dataclass(frozen=True, slots=True)
class Prepared:
    """A month before its second night, and the same night computed in full."""

    month: Month
    full: str

    @classmethod
    def of(cls, month: Month, earlier_events: Sequence[Event], changes: Sequence[Event]) -> "Prepared":
        """Publish a base after some changes, make others, and compute the next night in full."""
        for event in earlier_events:
            event.happen(month)
        month.publish()
        month.night = 1
        for event in changes:
            event.happen(month)
        return cls(month, month.compute())

    def copy(self, folder: Path) -> Month:
        """Return a copy in a folder of its own."""
        shutil.copytree(str(self.month.config.base), folder)
        config, full = (
            replace(night_config, base=str(folder)) for night_config in (self.month.config, self.month.full)
        )
        return Month(config, full, np.random.default_rng(0), 1, generations=list(self.month.generations))


def judged(build: Build) -> Measurement:
    """Return the verdict of the gate `identity` on a night up to its pages."""
    assemble.run(build.config, {"generation": build.generation})
    build.report(INDEX_REPORT, IndexReport(indexes={}, seconds=0.0))
    build.report(QUANTIZE_REPORT, QuantizeReport(models={}, seconds=0.0))
    manifest = write_manifest(build, ())
    candidate = Candidate(
        manifest, build.root, ItemTable.open(build.root, manifest), cast(Control, None), None,
        build.config.gates, build.config.history_limit, scoring_hooks=scoring_hooks(), build=build,
    )  # fmt: skip
    return identity(candidate)


def redigested(month: Month, digests: Any) -> None:
    """Rewrite the base's digests of users by another function of (entities, hashes of the items)."""
    base = month.build(month.generations[-1])
    items = open_items(base.root, base.need_report(BEGIN_REPORT)).directory.hashes()
    for shard in range(month.config.shards):
        entities: ShardInput = read_shard(base.root / PARTITION_FOLDER, shard, history_limit=month.config.history_limit)
        user_digests: Digests = digests(entities, items)
        base.path(inputs_path(shard)).write_bytes(pair_with_digests(entities, user_digests).tobytes())
        report = base.need_report(shard_report_name(shard))
        report["users"]["inputs"] = file_entry(base.describe(inputs_path(shard)))
        base.report(shard_report_name(shard), report)
