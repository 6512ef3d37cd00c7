"""Night in one process: the steps in the order of the DAG, their shared state, and the table of their rows."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from cache.config.timetable import NIGHT_STEPS
from cache.errors import ModelFailed
from precompute.builds.night_failure import forget_failure, hold_running_file, note_failure_of_step
from precompute.builds.reports import BuildId
from precompute.config.devices import devices
from precompute.config.progress import Progress, quiet, size_text
from precompute.config.settings import NightConfig


@dataclass(frozen=True, slots=True)
class Night:
    """Values that any step may need; `generation` is empty before `begin`.

    `data_until`, `run_after` and `named` are times (ISO 8601) for `begin`. `attempt` names this run, by which a
    repeated publish is recognised.
    """

    config: NightConfig
    attempt: str
    data_until: str | None = None
    run_after: str | None = None
    named: str | None = None
    progress: Progress = quiet
    generation: str = ""

    @property
    def build(self) -> BuildId:
        """Argument of the steps after `begin`."""
        return {"generation": self.generation}


@dataclass(frozen=True, slots=True)
class StepRow:
    """Result of a step and its row in a night's table; `unit_count` and `size_bytes` are 0 if they have no meaning.

    `result_summary` may have several lines.
    """

    step_result: Mapping[str, Any]
    result_summary: str
    unit_count: int = 0
    unit_name: str = ""
    size_bytes: int = 0

    def rate_text(self, step_seconds: float) -> str:
        """Format the rate per second; empty if nothing was counted."""
        if not self.unit_count:
            return ""
        per_second = self.unit_count / max(step_seconds, 1e-9)
        return f"{size_text(per_second)}/s" if self.unit_name == "B" else f"{per_second:,.0f} {self.unit_name}/s"


def find_step(step_name: str) -> Callable[[Night], StepRow]:
    """Return the step of that name: `in_night` of its module in `precompute.steps`."""
    run_step: Callable[[Night], StepRow] = import_module(f"precompute.steps.{step_name}").in_night
    return run_step


def run_night(night: Night, last_step: str = NIGHT_STEPS[-1]) -> list[tuple[str, StepRow, float]]:
    """Run the steps up to `last_step`; return each with its row and seconds. Ends early if this generation is live."""
    devices(night.config.device)  # raises for a missing device before any file is read
    finished_steps: list[tuple[str, StepRow, float]] = []
    with hold_running_file(night.config) as note_step:
        for step_name in NIGHT_STEPS:
            started_s, generation = time.perf_counter(), night.generation or None
            note_step(step_name, generation)
            with note_failure_of_step(night.config, step_name, generation):
                try:
                    row = find_step(step_name)(night)
                except ModelFailed as error:
                    raise ModelFailed(f"step {step_name}: {error.message}", **error.details) from error
            finished_steps.append((step_name, row, time.perf_counter() - started_s))
            if not night.generation:
                night = replace(night, generation=row.step_result["generation"])
            if step_name == last_step or row.step_result.get("already_live"):
                break
    forget_failure(night.config)
    return finished_steps
