"""Positions of the events that generations have, for the command `status`."""

from collections.abc import Mapping, Sequence
from typing import Any

from cache.errors import CorruptArtefact
from cache.format.manifest import Manifest
from cache.format.stream_position import STREAM_BEGINNING, Position
from precompute.config.console import iso
from precompute.config.settings import NightConfig
from precompute.events.files import demand_all_files, last_taken_position


def events_until(manifest: Manifest) -> str | None:
    """Return the position up to which a generation includes events; None without events."""
    return None if manifest.events is None else manifest.events.until


def events_status(config: NightConfig, generations: Sequence[Mapping[str, Any]]) -> dict[str, str | None] | None:
    """Return the positions up to which nights took events, and the live generation has them; None without events."""
    if not config.events.enabled:
        return None
    live_positions = (
        generation_status["events_until"] for generation_status in generations if "live" in generation_status["roles"]
    )
    return {
        "taken_until": str(last_taken_position(config.of_events().store())),
        "live_until": next(live_positions, None),
    }


def event_problems(config: NightConfig, generations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the problems that files of events are missing; empty without events."""
    if (events_fields := events_status(config, generations)) is None:
        return []
    store = config.of_events().store()
    try:
        demand_all_files(store)
    except CorruptArtefact as error:
        return [error.message]
    taken_until, live_until = events_fields["taken_until"], events_fields["live_until"]
    if live_until is None or taken_until is None or Position.parse(live_until) <= Position.parse(taken_until):
        return []
    problem = (
        f"the live generation has events up to {live_until}, but the files in {store.url} end at {taken_until}: the "
        "next night lacks those that the Redis of events no longer has; restore the files from a copy of the store"
    )
    return [problem]


def event_lines(namespace_status: Mapping[str, Any]) -> list[str]:
    """Return a line on these positions; empty without events."""
    if (events_fields := namespace_status["events"]) is None:
        return []
    live_until, taken_until = (
        _position_text(events_fields[field_name]) for field_name in ("live_until", "taken_until")
    )
    return [f"events: the live generation has them up to {live_until}; nights took them over up to {taken_until}"]


def _position_text(position_text: str | None) -> str:
    """Format an event position with its time; "none" before the first."""
    event_position = STREAM_BEGINNING if position_text is None else Position.parse(position_text)
    return "none" if event_position == STREAM_BEGINNING else f"{iso(event_position.ms / 1000)} ({event_position})"
