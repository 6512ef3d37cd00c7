"""A whole night in one process: the steps that the DAG wires, in the same order."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from cache.control.night_steps import NIGHT
from precompute.builds.night import Night, StepRow, size_text
from precompute.config.devices import devices


@dataclass(frozen=True, slots=True)
class Line:
    """Row of a night's table: what, how many, how long, and how fast and how big where that has a meaning."""

    step: str
    what: str
    seconds: float
    rate: str = ""
    size: str = ""


def step_in_night(name: str) -> Callable[[Night], StepRow]:
    """The step of that name: `in_night` of its module in `precompute.steps`."""
    run: Callable[[Night], StepRow] = import_module(f"precompute.steps.{name}").in_night
    return run


def run_night(night: Night) -> list[Line]:
    """Begin to retire; ends early when this very generation is live already."""
    devices(night.config.device)  # what is not there is said before anything is read
    lines: list[Line] = []
    for name in NIGHT:
        started = time.perf_counter()
        row = step_in_night(name)(night)
        lines.append(_line(name, row, time.perf_counter() - started))
        if not night.build:
            night = replace(night, build=row.found)
        if row.found.get("already_live"):
            break
    return lines


def _line(name: str, row: StepRow, seconds: float) -> Line:
    size = size_text(row.size_bytes) if row.size_bytes else ""
    return Line(name.replace("_", " "), row.what, seconds, _rate(row, seconds), size)


def _rate(row: StepRow, seconds: float) -> str:
    if not row.count:
        return ""
    each = row.count / max(seconds, 1e-9)
    return f"{size_text(each)}/s" if row.unit == "B" else f"{each:,.0f} {row.unit}/s"
