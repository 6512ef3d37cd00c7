"""A whole night in one process: the steps that the DAG wires, in the same order."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from cache.control.night_steps import NIGHT
from precompute.builds.night import Night, StepRow
from precompute.config.devices import devices


def step_in_night(name: str) -> Callable[[Night], StepRow]:
    """The step of that name: `in_night` of its module in `precompute.steps`."""
    run: Callable[[Night], StepRow] = import_module(f"precompute.steps.{name}").in_night
    return run


def run_night(night: Night, until: str = NIGHT[-1]) -> list[tuple[str, StepRow, float]]:
    """Begin to `until`, each step with its row and seconds; ends early when this very generation is live already."""
    devices(night.config.device)  # what is not there is said before anything is read
    found: list[tuple[str, StepRow, float]] = []
    for name in NIGHT:
        started = time.perf_counter()
        row = step_in_night(name)(night)
        found.append((name, row, time.perf_counter() - started))
        if not night.build:
            night = replace(night, build=row.found)
        if name == until or row.found.get("already_live"):
            break
    return found
