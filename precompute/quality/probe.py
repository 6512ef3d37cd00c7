"""Probe of a night: the inputs of the first users that `quantize` reads, up to a fixed number."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.quality.probe import PROBE_FACT, PROBE_FILE, PROBE_USERS_MAX, ProbePart, probe_part, write_probe
from precompute.builds.build import Build
from precompute.builds.reports import QUANTIZE_REPORT, SampleFields, ShardReport, file_entry
from precompute.partitions.shard_input import ShardInput


class ProbeTaker:
    """Collector of the probe's parts from successive samples of users.

    Users with a vector from the sources are left out: their lists were not computed from histories and features, so a
    recomputed answer that differs would not mean drift.
    """

    def __init__(self) -> None:
        self._probe_parts: list[ProbePart] = []
        self._user_count = 0

    def take(self, users: ShardInput, usable_rows: NDArray[np.int64]) -> bool:
        """Take the rows still needed from the `usable_rows`; return True if more are needed."""
        taken_rows = usable_rows[~users.has_vector[usable_rows]][: PROBE_USERS_MAX - self._user_count]
        if len(usable_rows) and not len(taken_rows):
            return False  # a slice is a random sample: if it has no such user, there are hardly any
        if len(taken_rows):
            self._user_count += len(taken_rows)
            self._probe_parts.append(
                probe_part(
                    users.entity_hashes, users.history_indptr, users.history_ordinals, users.features, taken_rows
                )
            )
        return self._user_count < PROBE_USERS_MAX

    def finish(self, build: Build) -> SampleFields:
        """Write and publish the probe, if it has any users; return `probe` for the step's report."""
        if not self._probe_parts:
            return {"probe": None}
        build.finish(write_probe(build.root, self._probe_parts))
        return {"probe": file_entry(build.describe(PROBE_FILE))}


def probe_fact(build: Build, _reports: Sequence[ShardReport]) -> Mapping[str, Any]:
    """Return the probe's file as a fact of the manifest; None if the probe has no users."""
    return {PROBE_FACT: build.need_report(QUANTIZE_REPORT)["probe"]}
