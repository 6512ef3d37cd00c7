"""Events as an additional input of a night, and their entries in the manifest and the night's table."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cache.events.new_items import ITEM_COLUMN_FACT, ITEM_VECTORS_FACT
from precompute.builds.build import Build, open_bundle
from precompute.builds.reports import BEGIN_REPORT, BeginReport, ShardReport
from precompute.config.settings import NightConfig
from precompute.events.event_trials import read_event_values
from precompute.events.files import event_files, read_event_interactions
from precompute.partitions.catalogue import feature_inputs
from precompute.partitions.night_input import EventFields, EventsEntry, FurtherInput


def event_input(config: NightConfig, events_until: str | None) -> FurtherInput:
    """Return the events up to a position (default: all in files); empty if events are disabled.

    Raises ConfigError for a position at which no file ends.
    """
    events = event_files(config, events_until)
    event_fields: EventFields = {}
    if events.until_position is not None:
        events_entry: EventsEntry = {"until": str(events.until_position), "files": len(events.files)}
        event_fields = {"events": events_entry, "events_namespace": config.of_events().namespace}
    return FurtherInput(
        files=events.files,
        newest_unix_s=None if events.until_position is None else events.until_position.ms // 1000,
        report_fields=event_fields,
        interactions=partial(read_event_interactions, events.files),
        values=partial(read_event_values, event_files=events.files),
    )


def event_facts_of_generation(build: Build, _reports: Sequence[ShardReport]) -> dict[str, Any]:
    """Return the facts of a generation with events that a service needs to count newer events with vectors."""
    begin_report = build.need_report(BEGIN_REPORT)
    if not begin_report.get("events"):
        return {}
    id_column = build.config.sources.item_column
    input_columns = {feature.column for feature in feature_inputs(open_bundle(build), "item")}
    return {
        **({ITEM_VECTORS_FACT: True} if build.config.sources.item_vectors else {}),
        **({ITEM_COLUMN_FACT: id_column} if id_column in input_columns else {}),
        **({"user_vectors": True} if begin_report.get("user_vectors") else {}),
    }


def describe_unlisted_items(begin_report: BeginReport, config: NightConfig) -> str:
    """Describe items that are in no table, from the report of `begin`; empty if there are none."""
    if not (unlisted_count := begin_report.get("unlisted_items", 0)):
        return ""
    return (
        f"\nitems of events that are in no table: {unlisted_count:,}; each is removed "
        f"{config.events.keep_values_days:g} days ([events] keep_values_days) after its newest event with features or "
        "a vector"
    )
