"""A night that was killed is resumed by the next one of the same cut, whatever events came meanwhile."""

from typing import Any

import pytest

from cache.store.artefacts import read_manifest
from precompute.steps import load
from precompute.steps.night import Night, run_night
from tests.integration.changed.month import Month
from tests.integration.taking.clicking import click, draw_mixed_events


class Killed(Exception):
    """A simulated kill."""


def killed(_night: Night) -> Any:
    raise Killed


def list_generations(month: Month) -> set[str]:
    return set(month.config.store().names("generations"))


def kill_in_load(month: Month) -> str:
    """Generation of a night that was killed before its pages were in Redis."""
    generations_before = list_generations(month)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "in_night", killed)
        with pytest.raises(Killed):
            run_night(night(month))
    (generation,) = list_generations(month) - generations_before
    return generation


def night(month: Month) -> Night:
    return Night(month.config, "try", data_until=month.cut.isoformat())


def test_a_second_night_goes_on_where_the_first_was_killed(featured: Month) -> None:
    month = featured
    first = click(month.config, draw_mixed_events(month, "a", 5))[-1]
    unfinished = kill_in_load(month)
    second = click(month.config, draw_mixed_events(month, "b", 5))[-1]

    assert run_night(night(month))[0][1].step_result["generation"] == unfinished

    store = month.config.store()
    events = read_manifest(store, unfinished).events
    assert events is not None and events.until == str(first)
    # and: events since then are in the next generation
    next_generation = run_night(night(month))[0][1].step_result["generation"]
    events = read_manifest(store, next_generation).events
    assert events is not None and events.until == str(second)


def test_other_files_of_the_team_make_another_night(featured: Month) -> None:
    month = featured
    click(month.config, draw_mixed_events(month, "a", 5))
    unfinished = kill_in_load(month)
    second = click(month.config, draw_mixed_events(month, "b", 5))[-1]
    month.a_day()

    next_generation = run_night(night(month))[0][1].step_result["generation"]

    events = read_manifest(month.config.store(), next_generation).events
    assert next_generation != unfinished and events is not None and events.until == str(second)
