"""Application of events' item values and new items to the generations that a replica holds."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Self

from cache.events.event_predictor import GenerationEvents
from cache.events.new_items import NewItemEvents, NewItemInputs
from cache.events.newer_events import AttributeEvents, NewerValues, ValuesOfItems
from cache.filters.attributes import ItemValue
from cache.filters.filtering import Filtering
from cache.format.manifest import Manifest
from cache.format.stream_position import Position
from cache.model.new_items import NewItem
from serving.events.newer_events import NewerEvents
from serving.generations.holder import GenerationHolder
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics

log = logging.getLogger(__name__)

_LOGGED_ITEMS_MAX: Final = 3
"""Largest number of new items without a vector that a log line names."""

VALUES_CHECK_INTERVAL_S = 0.25
"""Seconds between checks for new item values of events; applying them rebuilds the changed columns."""


class ItemUpdate(NamedTuple):
    """Extent to which a snapshot includes item values and new items of events.

    `values_until_position_number` is the number of the position up to which it has item values; `new_items_version` is
    the version of `NewItemEvents` from which its new items were made.
    """

    values_until_position_number: int
    new_items_version: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Return the update of a snapshot; a newly opened snapshot is as its night built it."""
        return snapshot.part(cls) or cls(events_until_position_number(snapshot.manifest))


def events_until_position_number(manifest: Manifest) -> int:
    """Return the number of the position up to which the night took events over; 0 if it took none."""
    return 0 if manifest.events is None else Position.parse(manifest.events.until).number


def new_item_inputs(snapshot: Snapshot) -> NewItemInputs | None:
    """Return the inputs with which unknown items can be answered; None without working models, or events."""
    generation_events = snapshot.part(GenerationEvents)
    return None if generation_events is None else generation_events.new_item_inputs


def with_changed_filtering(snapshot: Snapshot, filtering: Filtering) -> Snapshot:
    """Return a snapshot with new item values; nightly lists by changed attributes are marked as outdated."""
    facet_by_table = {} if snapshot.manifest.events is None else snapshot.manifest.events.facets
    return snapshot.with_same_stamp(
        part_by_class={**snapshot.part_by_class, Filtering: filtering},
        changed_values_by_facet={
            table: filtering.attributes.columns[attribute_name]
            for table, attribute_name in facet_by_table.items()
            if attribute_name in filtering.changed_attributes
        },
        changed_filter_names=frozenset(filter(filtering.may_differ_from_night, snapshot.manifest.filters)),
    )


class ItemUpdater:
    """Updater of one holder's snapshots, also of newly opened ones."""

    def __init__(
        self,
        holder: GenerationHolder,
        newer_events: NewerEvents,
        metrics: Metrics,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._attribute_events, self._new_item_events = newer_events.values, newer_events.items
        self._metrics = metrics
        self._monotonic_clock = monotonic_clock
        self._failed_generations: set[str] = set()
        holder.update_snapshot = self.update

    async def apply_new_values(self) -> None:
        """Apply newer item values and new items to all held generations."""
        while (served := self._holder.served) is not None and any(map(self._is_behind, served.snapshots)):
            update = self._update_of(served.snapshots)
            if await self._holder.change_snapshots(served, update.apply_to):
                self._metrics.set_by_events(update.outcome_counts_by_generation[served.live.generation])
                return

    def recheck_values(self) -> None:
        """Make `apply_new_values` check all values again, because earlier values were added."""
        if self._holder.served is not None:
            self._holder.served = self._holder.served.map_snapshots(_with_values_of_night)

    async def update(self, snapshot: Snapshot) -> Snapshot:
        """Return a newly opened snapshot with the item values and new items of events since its night."""
        if not self._is_behind(snapshot):
            return snapshot
        return await asyncio.to_thread(self._update_of((snapshot,)).apply_to, snapshot)

    def _update_of(self, snapshots: Iterable[Snapshot]) -> "SnapshotUpdate":
        missing_by_generation = {
            snapshot.generation: MissingItems.of(self._attribute_events, self._new_item_events, snapshot)
            for snapshot in snapshots
            if self._is_behind(snapshot)
        }
        return SnapshotUpdate(missing_by_generation, self._failed_generations, self._monotonic_clock())

    def _is_behind(self, snapshot: Snapshot) -> bool:
        """True if the snapshot lacks known values or items, unless earlier events still have to be read again."""
        update = ItemUpdate.of(snapshot)
        if update.values_until_position_number < self._attribute_events.complete_after_number:
            return False
        if new_item_inputs(snapshot) is not None and update.new_items_version != self._new_item_events.version:
            return True
        if snapshot.new_items.next_retry_at_s <= self._monotonic_clock():
            return True
        if snapshot.part(Filtering) is None and not snapshot.new_items:
            return False
        return self._attribute_events.newest_item_number > update.values_until_position_number


def _with_values_of_night(snapshot: Snapshot) -> Snapshot:
    values_until = events_until_position_number(snapshot.manifest)
    return snapshot.with_part(ItemUpdate.of(snapshot)._replace(values_until_position_number=values_until))


class MissingItems(NamedTuple):
    """Item values of events that a generation lacks, and all new items with all of their values."""

    values: NewerValues
    new_items: tuple[NewItem, ...]
    values_of_new_items: ValuesOfItems
    new_items_version: int

    @classmethod
    def of(cls, attribute_events: AttributeEvents, new_item_events: NewItemEvents, snapshot: Snapshot) -> Self:
        generation_events = snapshot.part(GenerationEvents)
        until_number = 0 if generation_events is None else generation_events.until_position_number
        new_items = (
            tuple(new_item_events.list_items_after(until_number)) if new_item_inputs(snapshot) is not None else ()
        )
        values_of_new_items = attribute_events.values_of_items(
            (new_item.raw_id for new_item in new_items), until_number
        )
        values_until = ItemUpdate.of(snapshot).values_until_position_number
        return cls(
            attribute_events.item_values_since(values_until), new_items, values_of_new_items, new_item_events.version
        )


class SnapshotUpdate:
    """Update of snapshots with item values and new items, for any thread.

    `failed_generations` are the generations for which a failure was already logged.
    """

    def __init__(
        self, missing_by_generation: Mapping[str, MissingItems], failed_generations: set[str], now_s: float
    ) -> None:
        self.outcome_counts_by_generation: dict[str, Counter[str]] = defaultdict(Counter)
        self._missing_by_generation = missing_by_generation
        self._failed_generations = failed_generations
        self._now_s = now_s

    def apply_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the values and new items; values of unknown attributes or items are ignored."""
        if (missing_items := self._missing_by_generation.get(snapshot.generation)) is None:
            return snapshot
        # Events come from outside: a generation that cannot apply one must still load, and answer as before.
        for apply_update in (self._with_values, self._with_new_items):
            try:
                snapshot = apply_update(snapshot, missing_items)
            except Exception:
                if snapshot.generation not in self._failed_generations:
                    self._failed_generations.add(snapshot.generation)
                    log.exception("generation %s cannot apply item values of events", snapshot.generation)
        return snapshot

    def _with_values(self, snapshot: Snapshot, missing_items: MissingItems) -> Snapshot:
        item_update = ItemUpdate.of(snapshot)._replace(
            values_until_position_number=missing_items.values.until_position_number
        )
        if (filtering := snapshot.part(Filtering)) is None:
            return snapshot.with_part(item_update)
        attribute_values, packed_new_item_values = (
            list(missing_items.values.iterate_values()),
            missing_items.values_of_new_items.packed_values_by_item,
        )
        ordinals = snapshot.items.ordinals_of(
            [attribute_value.entity_id for attribute_value in attribute_values]
        ).tolist()
        item_values = [
            ItemValue(ordinal, attribute_value.attribute, attribute_value.new_value)
            for ordinal, attribute_value in zip(ordinals, attribute_values, strict=True)
            if ordinal >= 0
        ]
        changed_filtering, changed_columns = filtering.with_item_values(item_values)
        count_by_outcome = self.outcome_counts_by_generation[snapshot.generation]
        ordinals_and_values = zip(ordinals, attribute_values, strict=True)
        is_item_unknown = [
            item_ordinal < 0 and attribute_value.entity_id not in packed_new_item_values
            for item_ordinal, attribute_value in ordinals_and_values
        ]
        count_by_outcome["unknown item"] = sum(is_item_unknown)
        count_by_outcome["unknown attribute"] = changed_columns.unknown_attribute_value_count
        for unfit_by_reason in changed_columns.unfit_ordinals.values():
            count_by_outcome.update(
                {unfit_reason: len(unfit_ordinals) for unfit_reason, unfit_ordinals in unfit_by_reason.items()}
            )
        count_by_outcome["set"] = len(attribute_values) - count_by_outcome.total()
        return with_changed_filtering(snapshot, changed_filtering).with_part(item_update)

    def _with_new_items(self, snapshot: Snapshot, missing_items: MissingItems) -> Snapshot:
        generation_events = snapshot.part(GenerationEvents)
        tower = None if generation_events is None else generation_events.item_tower
        if tower is None:
            return snapshot
        values_by_item = {
            new_item.raw_id: missing_items.values_of_new_items.values_of_item(new_item.raw_id)
            for new_item in missing_items.new_items
        }
        new_items = tower.compute_new_items(
            snapshot.items, missing_items.new_items, values_by_item, snapshot.new_items, self._now_s
        )
        if newly_left_out := sorted(new_items.left_out_ids - snapshot.new_items.left_out_ids):
            log.warning(
                "generation %s has no vector for %d new items, so no list names them (%s): the item tower fails for "
                "them, or returns a number that is not finite or too large",
                snapshot.generation, len(newly_left_out),
                ", ".join(repr(item_id.decode()) for item_id in newly_left_out[:_LOGGED_ITEMS_MAX]),
            )  # fmt: skip
        values_of_new_items = [values_by_item[new_item.raw_id] for new_item in new_items.items]
        if (filtering := snapshot.part(Filtering)) is not None:
            snapshot = snapshot.with_part(filtering.with_new_items(values_of_new_items, new_items.vectors))
        item_update = ItemUpdate.of(snapshot)._replace(new_items_version=missing_items.new_items_version)
        return snapshot.with_part(item_update).with_new_items(new_items)
