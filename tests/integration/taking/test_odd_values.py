"""Nights in which events set what models cannot take: they are made all the same, and copies are as full nights are."""

from typing import Any

from cache.events.event import Event
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.events import event_trials
from tests.integration.changed.month import Month, scored
from tests.integration.taking.clicking import click, draw_mixed_events, take_all_events

HUGE = 3e38


def odd(month: Month, number: int) -> list[Event]:
    """Values beyond a table, and such as overflow, of a few users and items, beside some that are well."""
    users, items = month.ids("user"), month.ids("item")
    user_attributes: list[tuple[int, dict[str, Any]]] = [
        (0, {"country": 2**40}), (1, {"country": -77, "mood": [0.5, 0.25]}), (2, {"country": 3}),
        (3, {"mood": [HUGE, 1e-30]}), (4 + number, {"country": 5}),
    ]  # fmt: skip
    events = [Event("", 0, users[row].encode(), None, attributes=attributes) for row, attributes in user_attributes]
    more: list[tuple[int, dict[str, Any]]] = [
        (0, {"scent": [HUGE] * 4}), (1, {"scent": [1.0] * 4}), (2 + number, {"looks": [HUGE] * 16}),
    ]  # fmt: skip
    events += [Event("", 0, None, items[row].encode(), attributes=attributes) for row, attributes in more]
    return [
        Event(f"odd-{number}-{at}", 0, event.user, event.item, attributes=event.attributes)
        for at, event in enumerate(events)
    ]


def test_nights_with_odd_values_copy_as_full_nights_compute(featured: Month) -> None:
    month = featured
    for number in range(3):
        month.night = number
        click(month.config, [*odd(month, number), *draw_mixed_events(month, f"n{number}", 10)])
        full = take_all_events(month.full)
        generation = month.publish()

        assert month.differences(generation, scored(full, month.cut)) == []
        unusable_by_source = Build(month.config, month.config.store(), generation).need_report(BEGIN_REPORT)["unusable"]
        assert (
            unusable_by_source["events.user_tower"]["reasons"][event_trials.MODEL_RAISES_REASON]["rows"] == 3 + number
        )
        assert unusable_by_source["events.item_tower"]["left_out"] == 1 + number
        assert unusable_by_source["events.worth"]["left_out"] == 1
