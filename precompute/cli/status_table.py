"""`status` for eyes. Pure."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from cache.events.position import BEGINNING, Position
from precompute.builds.night import size_text
from precompute.cli.status_report import (
    REDIS_NOT_CONFIGURED,
    REDIS_REACHABLE,
    REDIS_UNREACHABLE,
    iso,
)
from precompute.reuse.words import users_in_words

_COLUMNS = ("generation", "state", "data until", "Redis", "store", "copied", "gates", "notes")


def render_status(status: Mapping[str, Any]) -> list[Table | str | Text]:
    """A verdict, the generations, then everything else in a line each."""
    table = Table(*_COLUMNS, title=f"namespace {status['namespace']}")
    for generation_status in status["generations"]:
        table.add_row(*_row(generation_status))
    lines = [f"not well: {problem}" for problem in status["problems"]] or [_well(status)]
    lines += list(_lines(status))
    return [table, *map(Text, lines)]


def _well(status: Mapping[str, Any]) -> str:
    """The verdict where no problem was found; it says so where nobody serves what is live."""
    is_served = status["replicas"] or status["redis"]["state"] != REDIS_REACHABLE
    return (
        "all is well" if is_served else "all is well, but no replica serves it: run `larder serve`"
    )


def _row(generation_status: Mapping[str, Any]) -> tuple[str, ...]:
    notes = list(generation_status["roles"])
    if generation_status["pinned"]:
        pinned_until = generation_status["pinned_until"]
        notes.append("pinned" + (f" until {pinned_until}" if pinned_until else ""))
    return (
        generation_status["generation"],
        generation_status["state"],
        generation_status["data_until"] or "-",
        _size(generation_status["redis_bytes"]),
        _size(generation_status["store_bytes"]),
        _format_copied_share(generation_status["reuse"]),
        _gates(generation_status["gates"]),
        " ".join(notes),
    )


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else size_text(size_bytes)


def _format_copied_share(reuse: Mapping[str, Any] | None) -> str:
    copied_fraction = None if reuse is None else reuse["share"]
    return "-" if copied_fraction is None else f"{copied_fraction:.1%}"


def _copies(status: Mapping[str, Any]) -> list[str]:
    """Copies of the live generation, and of the last nights up to it."""
    reuse = next(
        (
            generation_status["reuse"]
            for generation_status in status["generations"]
            if "live" in generation_status["roles"]
        ),
        None,
    )
    if reuse is None:
        return []
    lately, line = reuse["lately"], f"users of the live one: {users_in_words(reuse['users'])}"
    if reuse["base"] is None:
        line += f": {reuse['why']}" if reuse["why"] else ""
    else:
        line += f"; {reuse['spared_s']:,.1f} s spared"
    if lately["nights"] > 1 and lately["share"] is not None:
        line += (
            f"; of the last {lately['nights']} nights {lately['share']:.1%} copied, "
            f"{lately['spared_s']:,.1f} s spared a night"
        )
    return [line]


def _events(status: Mapping[str, Any]) -> list[str]:
    if (events := status["events"]) is None:
        return []
    live, taken_until = (_position(events[name]) for name in ("live_until", "taken_until"))
    return [
        f"events: the live one has them up to {live}; nights took them over up to {taken_until}"
    ]


def _position(position: str | None) -> str:
    """Time that a position of an event tells, with the position; "none" before the first."""
    event_position = BEGINNING if position is None else Position.parse(position)
    return (
        "none"
        if event_position == BEGINNING
        else f"{iso(event_position.ms / 1000)} ({event_position})"
    )


def _gates(gates: Mapping[str, Any] | None) -> str:
    if gates is None:
        return "-"
    if not gates["run"]:
        return "not run"
    failed, overrides = [gate["rule"] for gate in gates["failed"]], gates["overrides"]
    waived = f"; waived: {', '.join(overrides)}" if overrides else ""
    return (f"failed: {', '.join(failed)}" if failed else f"{gates['run']} passed") + waived


def _lines(status: Mapping[str, Any]) -> list[str]:
    schedule, redis = status["schedule"], status["redis"]
    state = "missing" if schedule["missing"] else "there"
    due = f"due: the generation of {schedule['due']} is {state}"
    after = f"next at {schedule['next']}, expected by {schedule['next_expected_by']}"
    lines = [f"{due}; {after} ({schedule['cron']}, {schedule['timezone']})"]
    if redis["state"] == REDIS_UNREACHABLE:
        lines.append(
            "this is what the artefact store knows; who was loaded or verified, Redis would"
        )
    elif redis["state"] == REDIS_NOT_CONFIGURED:
        lines.append(
            "no Redis is configured and none runs here: this is what the artefact store knows"
        )
    else:
        epoch = status["epoch"]
        lines.append(
            "Redis has no pointer: nothing published, or lost (restore)"
            if epoch is None
            else f"epoch {epoch}"
        )
        if limit := redis.get("limit_bytes"):
            lines.append(f"Redis holds {size_text(redis['used_bytes'])} of {size_text(limit)}")
    if (canary := status["canary"]) is not None:
        lines.append(f"canary {canary['generation']} on {canary['percent']:g} %")
    lines += _copies(status)
    lines += _events(status)
    replicas = len(status["replicas"])
    replicas_text = (
        f"{replicas} replica{'s' * (replicas != 1)}"
        if redis["state"] == REDIS_REACHABLE
        else "replicas not counted, for they beat in Redis"
    )
    lines.append(f"{replicas_text}, blocklist version {status['blocklist_version']}")
    lines.append(f"{status['erasures_pending']} erasures pending (erase --list)")
    return lines
