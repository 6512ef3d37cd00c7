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


def run_night(night: Night, last_step: str = NIGHT[-1]) -> list[tuple[str, StepRow, float]]:
    """Begin to `last_step`, each step with its row and seconds; ends early if this generation is live."""
    devices(night.config.device)  # what is not there is said before anything is read
    finished_steps: list[tuple[str, StepRow, float]] = []
    for name in NIGHT:
        started = time.perf_counter()
        row = step_in_night(name)(night)
        finished_steps.append((name, row, time.perf_counter() - started))
        if not night.build:
            night = replace(night, build=row.result)
        if name == last_step or row.result.get("already_live"):
            break
    return finished_steps
