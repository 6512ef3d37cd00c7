"""What events set for items is in force for all that is held, and for what is opened later, from its position on."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.events.event import Event
from cache.events.event_predictor import GenerationEvents
from cache.events.new_items import TOWER_RETRY_PAUSES_S, NewItemInputs, NewItemTower
from cache.events.newer_events import AttributeEvents
from cache.filters.expression import read_filter
from cache.filters.filtering import Filtering
from cache.format.manifest import IncludedEvents
from cache.format.stream_position import Position
from cache.model.tower_spec import InputSpec
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from serving.events.item_updates import ItemUpdater
from serving.events.newer_events import NewerEvents
from serving.generations.snapshot import Snapshot
from tests.unit.cache.filters.columns import attributes_of
from tests.unit.serving.scene import A, B, Scene, pointer
from tests.unit.serving.world import ITEMS

DIMS = 4
STOCKED, CHEAP = read_filter({"==": ["stock", True]}), read_filter({"<": ["price", 10]})
UNTIL_POSITIONS = {A: Position(100, 0), B: Position(200, 0)}


class Stocked(Scene):
    """A scene whose generations have attributes, and events up to a position each."""

    events: GenerationEvents | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.newer_events = NewerEvents()
        self.updater = ItemUpdater(self.shelf, self.newer_events, self.world.metrics, self.timer)

    def open(self, to: Pointer, blocklist: Blocklist) -> Snapshot:
        items = self.world.items
        filtering = Filtering(
            attributes_of([{"stock": True, "price": 5}] * items.count),
            items.vectors,
            filter_by_name={"stocked": STOCKED},
        )
        snapshot = super().open(to, blocklist)
        until_position = UNTIL_POSITIONS[to.generation]
        manifest = dataclasses.replace(snapshot.manifest, events=IncludedEvents(str(until_position), 10))
        parts: dict[type, Any] = {Filtering: filtering}
        if self.events is not None:
            parts[GenerationEvents] = self.events
        return dataclasses.replace(snapshot, manifest=manifest, part_by_class=parts)


@pytest.fixture
def scene(tmp_path: Path) -> Stocked:
    return Stocked(tmp_path)


def add_event(scene: Stocked, ms: int, item: str, **attributes: Any) -> None:
    """An event at a position."""
    event = Event(f"e{ms}", 0, None, item.encode(), attributes=attributes)
    assert scene.newer_events.values.add(Position(ms, 0), event)


def out_of_stock(snapshot: Snapshot | None) -> set[str]:
    filtering = None if snapshot is None else snapshot.part(Filtering)
    assert snapshot is not None and filtering is not None
    filter_mask = filtering.evaluate(STOCKED)
    return set(ITEMS) - set(snapshot.items.ids_of(filter_mask.ordinals().astype(np.uint32)))


async def test_a_value_is_in_force_with_the_next_look(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    snapshot_before = scene.shelf.live
    add_event(scene, 101, "i3", stock=False)
    assert out_of_stock(scene.shelf.live) == set()

    await scene.updater.apply_new_values()

    assert out_of_stock(scene.shelf.live) == {"i3"} and out_of_stock(snapshot_before) == set()
    add_event(scene, 102, "i3", stock=True)
    add_event(scene, 103, "i4", stock=False)
    await scene.updater.apply_new_values()
    assert out_of_stock(scene.shelf.live) == {"i4"}


async def test_every_generation_has_the_events_behind_its_own_position(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    add_event(scene, 150, "i3", stock=False)
    await scene.updater.apply_new_values()
    await scene.publish(pointer(B, 2, previous=A))  # its night took 150 over
    add_event(scene, 250, "i5", stock=False)
    await scene.updater.apply_new_values()

    served = scene.shelf.served
    assert served is not None and served.previous is not None
    assert out_of_stock(served.live) == {"i5"}
    assert out_of_stock(served.previous) == {"i3", "i5"}


async def test_a_generation_that_cannot_take_a_value_over_costs_no_other_and_can_be_loaded(
    scene: Stocked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.publish(pointer(A, 1))
    await scene.publish(pointer(B, 2, previous=A))
    snapshot, changed_by = scene.shelf.find_snapshot(A), Filtering.with_item_values
    odd = None if snapshot is None else snapshot.part(Filtering)
    assert odd is not None

    def changes(self: Filtering, values: Any) -> Any:
        if self is odd:
            raise IndexError("99999 is out of bounds")
        return changed_by(self, values)

    monkeypatch.setattr(Filtering, "with_item_values", changes)
    add_event(scene, 250, "i5", stock=False)
    for _ in range(3):
        await scene.updater.apply_new_values()

    assert out_of_stock(scene.shelf.live) == {"i5"} and scene.shelf.find_snapshot(A) is not None
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    monkeypatch.setattr(Filtering, "with_item_values", lambda *_: 1 / 0)
    assert (await scene.shelf.open_staged(A)).generation == A


async def test_values_that_were_read_again_are_in_force_though_newer_ones_are(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    add_event(scene, 150, "i3", stock=False)
    await scene.updater.apply_new_values()
    reread_events = AttributeEvents()
    reread_events.add(Position(120, 0), Event("e120", 0, None, b"i4", attributes={"stock": False}))
    scene.newer_events.values.prepend(reread_events)

    scene.updater.recheck_values()
    await scene.updater.apply_new_values()

    assert out_of_stock(scene.shelf.live) == {"i3", "i4"}


async def test_what_is_opened_later_knows_them_at_once(scene: Stocked) -> None:
    add_event(scene, 150, "i3", stock=False)
    add_event(scene, 250, "i5", stock=False)

    await scene.publish(pointer(A, 1))
    assert out_of_stock(scene.shelf.live) == {"i3", "i5"}
    await scene.publish(pointer(B, 2, previous=A))
    assert out_of_stock(scene.shelf.live) == {"i5"}


async def test_one_that_lacks_forgotten_values_takes_none_until_all_are_there_again(scene: Stocked) -> None:
    await scene.publish(pointer(B, 1))
    add_event(scene, 150, "i3", stock=False)
    add_event(scene, 250, "i5", stock=False)
    scene.newer_events.values.drop_until(UNTIL_POSITIONS[B].number)
    await scene.publish(pointer(A, 2, previous=B))  # a rollback to what was not held
    await scene.updater.apply_new_values()
    assert out_of_stock(scene.shelf.live) == set()

    reread_events = AttributeEvents()
    for ms, item in ((150, "i3"), (250, "i5")):
        reread_events.add(Position(ms, 0), Event(f"e{ms}", 0, None, item.encode(), attributes={"stock": False}))
    reread_events.complete_after_number = UNTIL_POSITIONS[A].number
    scene.newer_events.values.replace_contents(reread_events)
    await scene.updater.apply_new_values()

    served = scene.shelf.served
    assert served is not None and served.previous is not None
    assert out_of_stock(served.live) == {"i3", "i5"}
    assert out_of_stock(served.previous) == {"i5"}


async def test_nothing_is_made_anew_where_nothing_changed(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    add_event(scene, 50, "i3", stock=False)  # before its position
    snapshot_before = scene.shelf.live

    await scene.updater.apply_new_values()

    assert scene.shelf.live is snapshot_before


async def test_answers_that_depend_on_no_attribute_stay_what_they_are(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    snapshot_before = scene.shelf.live
    add_event(scene, 101, "i3", stock=False)

    await scene.updater.apply_new_values()

    after = scene.shelf.live
    assert snapshot_before is not None and after is not None and after is not snapshot_before
    assert after.stamp == snapshot_before.stamp and after.item_values_stamp != snapshot_before.item_values_stamp
    for snapshot in (after.with_blocklist(Blocklist(1)), after.released_as(9, 9.0)):
        assert snapshot.stamp != after.stamp and snapshot.item_values_stamp != after.item_values_stamp
        assert out_of_stock(snapshot) == {"i3"}
    assert len({snapshot_before.stamp, snapshot_before.item_values_stamp, after.item_values_stamp}) == 3


async def test_blocklist_and_values_may_change_at_once(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    for ms in range(101, 106):
        add_event(scene, ms, f"i{ms - 100}", stock=False)

    async with asyncio.timeout(10):
        await asyncio.gather(
            *(
                scene.shelf.put_own_blocklist_in_force(Blocklist(version, frozenset({b"i9"})))
                for version in range(1, 6)
            ),
            *(scene.updater.apply_new_values() for _ in range(5)),
        )

    live = scene.shelf.live
    assert live is not None and live.blocklist.version == 5
    assert {live.items.id_of(ordinal) for ordinal in live.blocked_item_numbers} == {"i9"}
    assert out_of_stock(live) == {f"i{number}" for number in range(1, 6)}


async def test_what_became_of_them_is_counted_once(scene: Stocked) -> None:
    await scene.publish(pointer(A, 1))
    await scene.publish(pointer(B, 2, previous=A))
    add_event(scene, 301, "i3", stock=False, colour="red")
    add_event(scene, 302, "i4", stock="no", price=3)
    add_event(scene, 303, "nothing-we-have", stock=True)

    await scene.updater.apply_new_values()

    assert dict(results(scene)) == {
        "set": 2.0, "unknown item": 1.0, "unknown attribute": 1.0, "not true or false": 1.0,
    }  # fmt: skip
    assert out_of_stock(scene.shelf.live) == {"i3", "i4"}


def results(scene: Stocked) -> Iterator[tuple[str, float]]:
    for family in scene.world.metrics.event_values.collect():
        for sample in family.samples:
            if sample.name == "larder_event_values_total" and sample.value:
                yield sample.labels["result"], sample.value


async def test_a_new_item_on_which_the_tower_raised_is_tried_again_when_it_is_time(tmp_path: Path) -> None:
    scene = Stocked(tmp_path)
    looks_input, is_full = (InputSpec("looks", "feature", "float32", column="looks", width=DIMS), True)

    def run(inputs: Any) -> Any:
        if is_full:
            raise MemoryError
        return inputs["looks"]

    tower: Any = SimpleNamespace(run=run, spec=SimpleNamespace(output_dims=DIMS))
    events = GenerationEvents(UNTIL_POSITIONS[A].number, {}, None, NewItemTower(NewItemInputs((looks_input,)), tower))
    scene.events = events
    await scene.publish(pointer(A, 1))
    features: dict[str, Any] = {"looks": (0.5,) * DIMS}
    event = Event("new", 0, None, b"new", features=features)
    scene.newer_events.values.add(Position(101, 0), event)
    scene.newer_events.items.add(Position(101, 0), event)
    await scene.updater.apply_new_values()
    assert scene.shelf.live is not None and not scene.shelf.live.new_items

    is_full = False
    await scene.updater.apply_new_values()
    snapshot_before = scene.shelf.live
    scene.timer.tick(TOWER_RETRY_PAUSES_S[0])
    await scene.updater.apply_new_values()

    live = scene.shelf.live
    assert live is not None and snapshot_before is not None and not snapshot_before.new_items
    assert [new_item.raw_id for new_item in live.new_items.items] == [b"new"]
    await scene.updater.apply_new_values()
    assert scene.shelf.live is live
