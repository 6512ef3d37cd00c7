"""Inputs that a generation publishes: with newer events they are what the next night computes from."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache.errors import Refused
from cache.events.event import Event
from cache.events.event_predictor import TimedItems, merge_histories
from cache.format.directory import Directory
from cache.format.ids import hash_id
from cache.format.item_table import ItemTable
from cache.format.manifest import FORMAT_WITH_EVENTS
from cache.format.seen_items import SeenItems, UserInput
from cache.format.stream_position import Position
from cache.store.artefacts import read_manifest
from precompute.config.settings import NightConfig
from precompute.events.files import last_taken_position
from tests.integration import nights
from tests.integration.changed.month import Month, spoil
from tests.integration.taking.clicking import click, draw_mixed_events, microseconds
from tests.opened import open_generation


def inputs_of(config: NightConfig, generation: str) -> tuple[ItemTable, dict[int, UserInput]]:
    """Published inputs of all users, by the hashes of their ids, and the items of a generation."""
    manifest, root = open_generation(config.store(), generation)
    users = Directory.open(root, manifest.entity_sets["user"])
    seen_items = SeenItems.open(root, manifest, users)
    assert seen_items is not None
    hashes = users.hashes()
    input_by_hash = {user_hash: seen_items.input_of(position) for position, user_hash in enumerate(hashes.tolist())}
    return ItemTable.open(root, manifest), input_by_hash


def test_published_inputs_and_newer_events_are_what_the_next_night_publishes(month: Month) -> None:
    # given: two nights, the second with more events, and a short `history_limit`
    click(month.config, draw_mixed_events(month, "a"))
    earlier_generation = month.publish()
    newer_events = draw_mixed_events(month, "b")
    users, items = month.ids("user"), month.ids("item")
    # one event after the cut, and one from long before all others
    newer_events += [
        Event("ahead", microseconds(month.cut) + 5, users[3].encode(), items[3].encode()),
        Event("long-ago", -5, users[4].encode(), items[4].encode()),
    ]
    positions = click(month.config, newer_events)
    month.night = 1
    after = month.publish()

    # then: the manifests have the positions
    store, limit = month.config.store(), month.config.history_limit
    first, second = (read_manifest(store, generation) for generation in (earlier_generation, after))
    assert first.events is not None and second.events is not None
    assert second.format == FORMAT_WITH_EVENTS and second.events.history_limit == limit
    assert second.events.until == str(positions[-1]) == str(last_taken_position(store))
    assert Position.parse(first.events.until) < positions[0]

    # and: each user's input equals the merged one
    (table, earlier_input_by_hash), (_, has) = (
        inputs_of(month.config, earlier_generation),
        inputs_of(month.config, after),
    )
    (seed,) = {manifest.entity_sets["user"].seed for manifest in (first, second)}
    by_user: dict[int, list[Event]] = {}
    for event in filter(lambda event: event.is_in_history, newer_events):
        by_user.setdefault(hash_id(event.user or b"", seed), []).append(event)
    merged = 0
    empty_input = UserInput(np.empty(0, np.int64), np.empty(0, np.int64), {})
    for user, published_input in has.items():
        earlier, events = earlier_input_by_hash.get(user, empty_input), by_user.get(user, [])
        ordinals = table.ordinals_of([event.item or b"" for event in events])
        at = np.array([event.at_us for event in events], np.int64)
        (expected,) = merge_histories(
            [TimedItems(earlier.item_ordinals, earlier.times_us)],
            [TimedItems(np.asarray(ordinals, np.int64), at)],
            limit,
        )
        assert published_input.item_ordinals.tolist() == expected.seen_items.tolist()
        assert expected.model_history.tolist() == published_input.item_ordinals[-limit:].tolist()
        merged += bool(events) and bool(len(earlier.item_ordinals))
        if user in earlier_input_by_hash:
            assert published_input.features == earlier.features
    assert merged > 20


def test_features_are_published_as_callers_send_them(featured: Month) -> None:
    month = featured
    generation = month.publish()

    _, input_by_hash = inputs_of(month.config, generation)

    seed = read_manifest(month.config.store(), generation).entity_sets["user"].seed
    rows = pq.read_table(month.config.path("users.parquet")).to_pylist()
    countries = {hash_id(row["user"].encode(), seed): row["country"] for row in rows}
    assert len(input_by_hash) == len(countries)
    assert {user_hash: input_by_hash[user_hash].features for user_hash in countries} == {
        user_hash: {"country": country} for user_hash, country in countries.items()
    }


@pytest.mark.parametrize("part", ["times", "features"])
def test_a_damaged_input_refuses_the_generation(part: str, featured: Month) -> None:
    month = featured
    generation = nights.build_verified(month.config, month.cut.isoformat())
    spoil(month.config, generation, f"seen/0001.{part}")

    with pytest.raises(Refused, match=f"seen/0001.{part}"):
        nights.publish(month.config, generation, verify_again=True)
