"""Step `retire`: removes generations that no reader and no roll back needs, and leftovers of killed programs."""

from dataclasses import replace

from cache.control.states import UNFINISHED
from cache.store.artefacts import COPY_IDLE_S
from precompute.bulk.governor import open_governor
from precompute.bundles.bundle_store import heal_swap, sweep_bundles, sweep_training
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.erasure.erasing import settle
from precompute.erasure.holders import sweep_left_out_notes
from precompute.events.stores import connect_events
from precompute.events.stream import EventStores, trim_stream
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.sweep import drop_old_rows, sweep
from precompute.steps.night import Night, StepRow
from precompute.traffic.exposures import erased_users, gather

UNFINISHED_S = 86_400.0
"""Seconds without a change after which an unfinished file counts as left over."""


def run(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Remove unneeded pages and files of generations, rows whose overlays are gone, and leftovers.

    Then mark erasures without holders as done, write files of the exposure log's finished hours, and trim the stream of
    events.
    """
    with open_releases(config) as releases:
        swept = sweep(config, releases, attempt=attempt, progress=progress)
        releases.control.forget_dead_replicas()
        with open_governor(config.governor, releases.control) as governor:
            rows = drop_old_rows(releases, overlay_ttl_s=config.overlay_ttl_s, governor=governor)
        leftovers = sweep_leftovers(config, releases)
        pending = sum(
            erasure_status.state == "pending" for erasure_status in settle(config, releases)
        )
        store, at = config.store(), releases.clock()
        exposures = gather(store, at=at, erased=erased_users(store))["parts"]
    trimmed = 0
    if config.events.enabled:
        # Its own stream, also where another namespace's counts since: that one is trimmed by its own nights.
        own_events_config = replace(config, events=replace(config.events, namespace=""))
        with connect_events(own_events_config) as client:
            trimmed = trim_stream(
                EventStores.of(own_events_config), client, own_events_config.keyspace(),
                keep_s=config.events.keep_s, stream_bytes=config.events.stream_bytes,
            )  # fmt: skip
    return {
        "retired": list(swept.retired), "spared": list(swept.spared), "keys": swept.keys,
        "rows": rows, "leftovers": leftovers, "erasures_pending": pending, "exposure_parts": exposures,
        "events_trimmed": trimmed,
    }  # fmt: skip


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    step_result = run(night.config, attempt=night.attempt, progress=night.progress)
    return StepRow(
        step_result, f"{len(step_result['retired'])} generations, {step_result['keys']:,} keys"
    )


def sweep_leftovers(config: NightConfig, releases: Releases) -> int:
    """Remove leftovers, by this host's own clock; return their number. Files in use by readers or nights stay."""
    store, now_s, bundle = releases.store, releases.clock(), config.path(config.bundle)
    view = releases.view()
    held_generations = {
        generation
        for replica in releases.control.replicas()
        for generation in replica.held_generations
    }
    needed_generations = {
        generation for generation, row in view.rows.items() if row.state in UNFINISHED
    }
    needed_generations |= {
        *held_generations,
        *filter(None, (view.ledger.live, view.ledger.previous)),
    }
    heal_swap(bundle)
    swept = len(store.sweep_host_copies(needed_generations, cutoff_at=now_s - COPY_IDLE_S))
    sweep_left_out_notes(store, needed_generations)
    return (
        swept
        + store.sweep_unfinished(cutoff_at=now_s - UNFINISHED_S)
        + sweep_bundles(store)
        + sweep_training(bundle, changed_before_s=now_s - UNFINISHED_S)
    )
