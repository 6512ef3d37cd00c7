"""Inputs that a generation publishes: with newer events they are what the next night computes from."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache.errors import Refused
from cache.events.event import Event
from cache.events.history import TimedItems, merge
from cache.events.position import Position
from cache.events.seen import SeenItems, UserInput
from cache.format.directory import Directory
from cache.format.ids import hash_id
from cache.format.item_table import ItemTable
from cache.format.manifest import WITH_EVENTS
from cache.store.artefacts import read_manifest
from precompute.config.settings import NightConfig
from precompute.events.files import last_taken
from tests.integration import nights
from tests.integration.changed.month import Month, spoil
from tests.integration.taking.clicking import click, microseconds, some
from tests.opened import open_generation


def inputs_of(config: NightConfig, generation: str) -> tuple[ItemTable, dict[int, UserInput]]:
    """Published inputs of all users, by the hashes of their ids, and the items of a generation."""
    manifest, root = open_generation(config.store(), generation)
    users = Directory.open(root, manifest.entity_sets["user"])
    seen = SeenItems.open(root, manifest, users)
    assert seen is not None
    hashes = users.hashes()
    found = {each: seen.input_of(place) for place, each in enumerate(hashes.tolist())}
    return ItemTable.open(root, manifest), found


def test_published_inputs_and_newer_events_are_what_the_next_night_publishes(month: Month) -> None:
    # given: two nights, the second with more events; the history is cut short
    click(month.config, some(month, "a"))
    before = month.publish()
    newer = some(month, "b")
    users, items = month.ids("user"), month.ids("item")
    # ahead of the cut, and long before everything
    newer += [
        Event("ahead", microseconds(month.cut) + 5, users[3].encode(), items[3].encode()),
        Event("long-ago", -5, users[4].encode(), items[4].encode()),
    ]
    positions = click(month.config, newer)
    month.night = 1
    after = month.publish()

    # then: the manifests say where they stand
    store, limit = month.config.store(), month.config.history_limit
    first, second = (read_manifest(store, each) for each in (before, after))
    assert first.events is not None and second.events is not None
    assert second.format == WITH_EVENTS and second.events.history_limit == limit
    assert second.events.until == str(positions[-1]) == str(last_taken(store))
    assert Position.parse(first.events.until) < positions[0]

    # and: each user's input is what merging gives
    (table, had), (_, has) = inputs_of(month.config, before), inputs_of(month.config, after)
    (seed,) = {each.entity_sets["user"].seed for each in (first, second)}
    by_user: dict[int, list[Event]] = {}
    for each in filter(lambda each: each.counts, newer):
        by_user.setdefault(hash_id(each.user or b"", seed), []).append(each)
    merged = 0
    nothing = UserInput(np.empty(0, np.int64), np.empty(0, np.int64), {})
    for user, found in has.items():
        earlier, events = had.get(user, nothing), by_user.get(user, [])
        ordinals = table.ordinals_of([each.item or b"" for each in events])
        at = np.array([each.at_us for each in events], np.int64)
        (expected,) = merge(
            [TimedItems(earlier.items, earlier.times)],
            [TimedItems(np.asarray(ordinals, np.int64), at)],
            limit,
        )
        assert found.items.tolist() == expected.had.tolist()
        assert expected.newest.tolist() == found.items[-limit:].tolist()
        merged += bool(events) and bool(len(earlier.items))
        if user in had:
            assert found.features == earlier.features
    assert merged > 20


def test_features_are_published_as_callers_send_them(featured: Month) -> None:
    month = featured
    generation = month.publish()

    _, found = inputs_of(month.config, generation)

    seed = read_manifest(month.config.store(), generation).entity_sets["user"].seed
    rows = pq.read_table(month.config.path("users.parquet")).to_pylist()
    countries = {hash_id(row["user"].encode(), seed): row["country"] for row in rows}
    assert len(found) == len(countries)
    assert {each: found[each].features for each in countries} == {
        each: {"country": country} for each, country in countries.items()
    }


@pytest.mark.parametrize("part", ["times", "features"])
def test_a_damaged_input_refuses_the_generation(part: str, featured: Month) -> None:
    month = featured
    generation = nights.build_verified(month.config, month.cut.isoformat())
    spoil(month.config, generation, f"seen/0001.{part}")

    with pytest.raises(Refused, match=f"seen/0001.{part}"):
        nights.publish(month.config, generation, verify_again=True)
