"""Retirement: what no reader and no roll back needs any more is removed."""

from dataclasses import replace

from precompute.builds.leftovers import sweep_leftovers
from precompute.builds.night import Night, StepRow
from precompute.builds.sweeping import sweep
from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.control.connection import connect_events
from precompute.erasing.erasing import settle
from precompute.events.stores import EventStores
from precompute.events.trimming import trim
from precompute.experiments.exposures import erased_users, gather
from precompute.releases.registry import open_releases
from precompute.releases.sweep import drop_old_rows


def run(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Remove what nobody needs any more: pages and files of generations, rows whose overlays are gone, leftovers.

    Then erasures whose last holder went are done, files are made of the hours of the exposure log that ended, and the
    stream of events is trimmed.
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
            trimmed = trim(
                EventStores.of(own_events_config), client, own_events_config.keyspace(),
                keep_s=config.events.keep_s, stream_bytes=config.events.stream_bytes,
            )  # fmt: skip
    return {
        "retired": list(swept.retired), "spared": list(swept.spared), "keys": swept.keys,
        "rows": rows, "leftovers": leftovers, "erasures_pending": pending, "exposure_parts": exposures,
        "events_trimmed": trimmed,
    }  # fmt: skip


def in_night(night: Night) -> StepRow:
    """The step with its row in a night's table."""
    step_result = run(night.config, attempt=night.attempt, progress=night.progress)
    return StepRow(
        step_result, f"{len(step_result['retired'])} generations, {step_result['keys']:,} keys"
    )
