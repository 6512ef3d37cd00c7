"""Step `retire`: removes generations that no reader or roll back needs, and leftovers of killed programs."""

from collections.abc import Collection
from typing import NotRequired, TypedDict, cast

from cache.control.states import UNFINISHED_STATES
from cache.store.artefacts import COPY_IDLE_S
from precompute.bulk.governor import open_governor
from precompute.bundles.bundle_store import heal_swap, sweep_bundles, sweep_training
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import sweeps_after_publish
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.sweep import drop_old_rows, sweep
from precompute.steps.night import Night, StepRow

UNFINISHED_AGE_S_MAX = 86_400.0
"""Seconds without a change after which an unfinished file counts as a leftover."""


class RetireResult(TypedDict):
    """Result of the step: generations retired and spared, and numbers of removed keys, rows and leftovers.

    The other fields are those of features.
    """

    retired: list[str]
    spared: list[str]
    keys: int
    rows: int
    leftovers: int
    erasures_pending: NotRequired[int]
    exposure_parts: NotRequired[int]
    events_trimmed: NotRequired[int]


def run(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> RetireResult:
    """Remove unneeded generations' pages and files, rows whose overlays have expired, and leftovers.

    Then sweep the stored data of each feature.
    """
    with open_releases(config) as releases:
        sweep_result = sweep(config, releases, attempt=attempt, progress=progress)
        releases.control.forget_dead_replicas()
        with open_governor(config.governor, releases.control) as governor:
            dropped_row_count = drop_old_rows(releases, overlay_ttl_s=config.overlay_ttl_s, governor=governor)
        needed_generations = find_needed_generations(releases)
        result: RetireResult = {
            "retired": list(sweep_result.retired_generations), "spared": list(sweep_result.spared_generations),
            "keys": sweep_result.removed_key_count, "rows": dropped_row_count,
            "leftovers": sweep_leftovers(config, releases, needed_generations),
        }  # fmt: skip
        for sweep_feature in sweeps_after_publish():
            result = cast(RetireResult, {**result, **sweep_feature(config, releases, needed_generations)})
    return result


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    result = run(night.config, attempt=night.attempt, progress=night.progress)
    return StepRow(result, f"{len(result['retired'])} generations, {result['keys']:,} keys")


def find_needed_generations(releases: Releases) -> set[str]:
    """Return the generations that a replica holds, that are unfinished, or that are live or previous."""
    view = releases.view()
    held_generations = {
        generation for replica in releases.control.replicas() for generation in replica.held_generations
    }
    unfinished_generations = {
        generation for generation, row in view.registry_rows.items() if row.state in UNFINISHED_STATES
    }
    return {
        *unfinished_generations,
        *held_generations,
        *filter(None, (view.ledger.live_generation, view.ledger.previous_generation)),
    }


def sweep_leftovers(config: NightConfig, releases: Releases, needed_generations: Collection[str]) -> int:
    """Remove leftovers, by the clock of Redis, except files of needed generations; return their number."""
    store, now_s, bundle = releases.store, releases.clock(), config.path(config.bundle)
    heal_swap(bundle)
    swept_copy_count = len(store.sweep_host_copies(needed_generations, cutoff_at=now_s - COPY_IDLE_S))
    return (
        swept_copy_count
        + store.sweep_unfinished(cutoff_at=now_s - UNFINISHED_AGE_S_MAX)
        + sweep_bundles(store)
        + sweep_training(bundle, changed_before_s=now_s - UNFINISHED_AGE_S_MAX)
    )
