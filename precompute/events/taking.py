"""Taking of events: the stream's new events are written to files in the store, where `begin` reads them."""

import argparse
from datetime import UTC, datetime

from cache.control.states import UNFINISHED_STATES
from cache.errors import ConfigError
from cache.format.manifest import GENERATION_PATTERN
from cache.format.stream_position import Position
from cache.store.erasures import all_erasures
from precompute.builds.build import Build, settings_digest
from precompute.builds.reports import BEGIN_REPORT
from precompute.bulk.headroom import convert_disk_errors
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.events.files import demand_all_files, event_files
from precompute.events.stores import connect_events
from precompute.events.stream import EventStores, forget_in_files, merge_files, take_events
from precompute.partitions.night_input import TakenEvents
from precompute.releases.release_log import open_releases
from precompute.sources.erasures import ErasedEntities
from precompute.sources.files import all_input_files, digest_files


@convert_disk_errors
def run(config: NightConfig) -> TakenEvents:
    """Write the stream's new events into the store; return their number, and the position up to which files have all.

    Nights of an arm, too, write events that the control's nights have not written yet into the files that both read.

    Raises TierUnavailable if the Redis of events does not answer: a night only runs without events if the settings say
    so.
    """
    if not config.events.enabled:
        raise ConfigError("[events] enabled is false: there are no events to take over", field="events")
    stores, keys = EventStores.of(config), config.of_events().keyspace()
    store = stores.namespace_store
    demand_all_files(store)  # before files are merged over a gap
    erased_entities = ErasedEntities.of(all_erasures(store))
    forget_in_files(
        store, erased_entities, newest_alone=True
    )  # the writer of the newest file may have been killed before it read the erasures again
    with connect_events(config) as client:
        taken_events = take_events(store, client, keys, erased_entities=erased_entities)
    merge_files(stores)
    if (
        latest_erased_entities := ErasedEntities.of(all_erasures(store))
    ) != erased_entities:  # requested while files were written
        forget_in_files(store, latest_erased_entities)
    return {
        "events_until": str(taken_events.until_position), "events": taken_events.event_count,
        "left_out": taken_events.left_out_count,
        "unreadable": taken_events.unreadable_count,
    }  # fmt: skip


def take_before_begin(config: NightConfig, cut: str | None) -> tuple[str | None, str]:
    """Take events; return (position up to which a night with this cut reads them, a line); (None, "") without events.

    A repeat of a killed night continues with the events of the killed one.
    """
    if not config.events.enabled:
        return None, ""
    taken_events = run(config)
    unfinished_until = _unfinished_until(config, cut)
    if unfinished_until is not None:
        taken_events = {**taken_events, "events_until": unfinished_until}
    return taken_events["events_until"], describe_taken_events(taken_events)


def _unfinished_until(config: NightConfig, cut: str | None) -> str | None:
    """Return the position of the newest unfinished generation of this cut, these settings and sources."""
    current_settings_digest, source_inputs = settings_digest(config), None
    with open_releases(config) as releases:
        for generation in sorted(releases.store.names("generations"), reverse=True):
            is_generation = GENERATION_PATTERN.fullmatch(generation) is not None
            if not is_generation or releases.state(generation) not in UNFINISHED_STATES:
                continue
            begin_report = Build(config, releases.store, generation).read_report(BEGIN_REPORT)
            if (
                begin_report is None
                or (begin_report["cut"], begin_report["settings"]) != (cut, current_settings_digest)
                or "events" not in begin_report
            ):
                continue
            events_until = begin_report["events"]["until"]
            try:
                event_file_names = {file.name for file in event_files(config, events_until).files}
            except ConfigError:  # later nights have merged the files
                continue
            source_inputs = source_inputs or digest_files(all_input_files(config))[1]
            if source_inputs == [
                pinned_input for pinned_input in begin_report["inputs"] if pinned_input["name"] not in event_file_names
            ]:
                return events_until
    return None


def describe_taken_events(taken_events: TakenEvents) -> str:
    """Describe one attempt, such as "12,345 events taken over, up to 2026-01-31T00:00:00Z (1769817600000-0)"."""
    until_position = Position.parse(taken_events["events_until"])
    until_time = datetime.fromtimestamp(until_position.ms / 1000, UTC)
    summary = f"{taken_events['events']:,} events taken over, up to {until_time:%Y-%m-%dT%H:%M:%SZ} ({until_position})"
    if not until_position.ms:
        summary = "0 events taken over: none was accepted yet"
    count_by_reason = {
        "erased": taken_events["left_out"], "that are no events": taken_events["unreadable"],
    }  # fmt: skip
    left_out_texts = [f"{count:,} {reason}" for reason, count in count_by_reason.items() if count]
    return f"{summary}; left out: {', '.join(left_out_texts)}" if left_out_texts else summary


def command(config: NightConfig, _arguments: argparse.Namespace, _progress: Progress) -> TakenEvents:
    """Write the stream's new events as files into the store."""
    return run(config)
