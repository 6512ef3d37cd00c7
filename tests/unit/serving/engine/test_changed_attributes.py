"""Lists that a night made by attributes are not answered unread where events have changed these."""

import dataclasses
from time import monotonic
from typing import Any

import numpy as np
import pytest

from cache.filters.attributes import ItemValue
from cache.filters.expression import read_filter
from cache.filters.filtering import Filtering
from cache.format.directory import Directory
from cache.format.ids import fingerprints, hash_ids
from cache.format.manifest import FACET_PREFIX, IncludedEvents, NamedFilter, Producer, Table, TablePart
from cache.records import Layout, encode_topk
from cache.tiers.reads import SnapshotView
from serving.engine.entity import find_plain_record_key, with_filter_table
from serving.events.item_updates import with_changed_filtering
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.requests.options import RequestOptions
from tests.unit.cache.filters.columns import attributes_of
from tests.unit.serving.world import GENERATION, ITEMS, NO_FILE, SCORED_AT, World, ask, entity

LAYOUT = Layout("topk", 5, "f4")
SEED = 17
BRANDS = ("acme", "best")


def brands(world: World) -> Snapshot:
    """A generation with a facet of brands, half of the items each, and a filter that lists were made under."""
    attributes = attributes_of(
        [{"brand": BRANDS[at % 2], "stock": True, "tags": ("a", "b")} for at in range(len(ITEMS))]
    )
    raws = [brand.encode() for brand in BRANDS]
    hashes = hash_ids(raws, SEED)
    order = np.argsort(hashes)
    part = TablePart(0, 1, len(raws), NO_FILE, NO_FILE)
    facet = Table("brands", f"{FACET_PREFIX}brands", Producer("none"), LAYOUT, 1_000, (part,), ())
    stocked_table = Table("user_topk.stocked", "user", Producer("topk"), LAYOUT, 1_000, (), ())
    lists = np.array([[at for at in range(10) if at % 2 == brand_index][:5] for brand_index in order], np.uint32)
    scores = np.tile(np.arange(5, 0, -1).astype(np.float32), (2, 1))
    prints = fingerprints([raws[brand_index] for brand_index in order])
    rows = encode_topk(LAYOUT, prints, lists, scores, SCORED_AT)
    world.remote.pages[GENERATION, "brands", 0] = rows.tobytes()
    initial_snapshot = world.snapshot()
    stocked: dict[str, Any] = {"==": ["stock", True]}
    manifest = dataclasses.replace(
        initial_snapshot.manifest,
        tables={**initial_snapshot.manifest.tables, "brands": facet},
        filters={"stocked": NamedFilter(stocked, {"user_topk": stocked_table})},
        events=IncludedEvents("0-0", 10, {"brands": "brand"}),
    )
    directories = {**initial_snapshot.directories, facet.entity: Directory(SEED, [0], [hashes[order]])}
    filtering = Filtering(attributes, world.items.vectors, filter_by_name={"stocked": read_filter(stocked)})
    return dataclasses.replace(
        initial_snapshot, manifest=manifest, directories=directories, part_by_class={Filtering: filtering},
        view=SnapshotView(GENERATION, directories),
    )  # fmt: skip


def apply_values(snapshot: Snapshot, *values: ItemValue) -> Snapshot:
    filtering = snapshot.part(Filtering)
    assert filtering is not None
    return with_changed_filtering(snapshot, filtering.with_item_values(values)[0])


@pytest.fixture
def world() -> World:
    return World()


async def facet_of(world: World, snapshot: Snapshot, brand: str) -> dict[str, Any]:
    (answer,) = await world.ladder.lookup(ServedGenerations(snapshot), ask(entity(brand, "brands")), monotonic())
    return answer


async def test_items_that_lost_the_value_leave_a_facets_list(world: World) -> None:
    snapshot = brands(world)
    assert (await facet_of(world, snapshot, "acme"))["items"] == world.ids([0, 2, 4, 6, 8])

    snapshot = apply_values(snapshot, ItemValue(2, "brand", "best"), ItemValue(4, "brand", None))

    answer = await facet_of(world, snapshot, "acme")
    assert answer["items"] == world.ids([0, 6, 8]) and answer["short"]
    full_answer = await facet_of(world, snapshot, "best")
    assert full_answer["items"] == world.ids([1, 3, 5, 7, 9]) and not full_answer["short"]


async def test_a_facet_of_which_nothing_is_left_has_no_items(world: World) -> None:
    brand_changes = [ItemValue(at, "brand", "best") for at in range(0, len(ITEMS), 2)]
    snapshot = apply_values(brands(world), *brand_changes)

    answer = await facet_of(world, snapshot, "acme")

    assert answer["items"] == [] and answer["source"] == "default"


def test_only_a_facet_of_what_changed_is_looked_at(world: World) -> None:
    snapshot = brands(world)
    assert not snapshot.changed_values_by_facet

    stock_changed_snapshot = apply_values(snapshot, ItemValue(2, "stock", False))
    assert not stock_changed_snapshot.changed_values_by_facet

    brand_changed_snapshot = apply_values(stock_changed_snapshot, ItemValue(2, "brand", "best"))
    assert set(brand_changed_snapshot.changed_values_by_facet) == {"brands"}


def test_a_list_made_under_a_filter_is_read_only_while_it_holds(world: World) -> None:
    snapshot, options = brands(world), RequestOptions(1.0, filter="stocked")
    record_key = find_plain_record_key(snapshot, snapshot.manifest.tables["user_topk"], b"u3")

    stocked_key = with_filter_table(snapshot, record_key, options)
    brand_changed_snapshot = apply_values(snapshot, ItemValue(2, "brand", "best"))
    stock_changed_snapshot = apply_values(snapshot, ItemValue(2, "stock", False))

    assert stocked_key.table.name == "user_topk.stocked"
    assert with_filter_table(brand_changed_snapshot, record_key, options).table.name == "user_topk.stocked"
    assert with_filter_table(stock_changed_snapshot, record_key, options) == record_key
