"""The generations that answer requests, as one value that a request captures, and its update by newer events."""

import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from cache.events.new_items import NewItemEvents
from cache.events.newer_events import AttributeEvents, NewerValues, ValuesOfItems
from cache.filters.attributes import ItemValue
from cache.model.new_items import NewItem
from cache.store.blocklist import Blocklist
from cache.traffic.split import KeySplit
from serving.generations.snapshot import Snapshot
from serving.requests.errors import Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedGenerations:
    """Live snapshot and, if held, the previous one and the next (which a canary tries out)."""

    live: Snapshot
    previous: Snapshot | None = None
    next: Snapshot | None = None
    canary: KeySplit | None = None

    def pinned(self, generation: str | None) -> Self:
        """Holding for a request that pins `generation`; raises Problem (409) if it is not live, previous or canary."""
        if generation is None:
            return self
        # What is only staged has not been published to anybody.
        offered = (self.live, self.previous, None if self.canary is None else self.next)
        for snapshot in offered:
            if snapshot is not None and snapshot.generation == generation:
                return dataclasses.replace(
                    self, live=snapshot, previous=None, next=None, canary=None
                )
        raise Problem(
            409, "generation_gone", f"generation {generation!r} is not live or previous here",
            field="generation", held=list(self.generations),
        )  # fmt: skip

    def for_canary(self, next_: Snapshot) -> Self:
        """Holding for a canary's whole request: the next generation, and the live one below it."""
        return dataclasses.replace(self, live=next_, previous=self.live, next=None, canary=None)

    @property
    def roles(self) -> dict[str, str]:
        """Generation of each role: live, previous, and next or canary."""
        named = {"live": self.live, "previous": self.previous}
        named["next" if self.canary is None else "canary"] = self.next
        return {
            role: snapshot.generation for role, snapshot in named.items() if snapshot is not None
        }

    @property
    def generations(self) -> tuple[str, ...]:
        """Ids of the held generations, the live one first."""
        return tuple(snapshot.generation for snapshot in self.snapshots)

    def with_blocklist(self, blocklist: Blocklist) -> Self:
        """All generations under another blocklist."""
        return self.map_snapshots(lambda snapshot: snapshot.with_blocklist(blocklist))

    def map_snapshots(self, change: Callable[[Snapshot], Snapshot]) -> Self:
        """All generations, each changed."""
        return dataclasses.replace(
            self,
            live=change(self.live),
            previous=self.previous and change(self.previous),
            next=self.next and change(self.next),
        )

    def find(self, generation: str | None) -> Snapshot | None:
        """The held snapshot of a generation."""
        return next(
            (snapshot for snapshot in self.snapshots if snapshot.generation == generation), None
        )

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Snapshots that are held, the live one first."""
        return tuple(
            snapshot for snapshot in (self.live, self.previous, self.next) if snapshot is not None
        )


class ItemUpdates(NamedTuple):
    """Lack of one generation: values that events set for items, and the new items with all values of theirs."""

    values: NewerValues
    new_items: tuple[NewItem, ...]
    of_new_items: ValuesOfItems
    version: int

    @classmethod
    def of(cls, attributes: AttributeEvents, events: NewItemEvents, snapshot: Snapshot) -> Self:
        until_number = 0 if snapshot.events is None else snapshot.events.until_number
        new_items = (
            tuple(events.list_items_after(until_number))
            if snapshot.new_item_inputs is not None
            else ()
        )
        values = attributes.of_items((new_item.raw for new_item in new_items), until_number)
        return cls(attributes.items_since(snapshot.values_until), new_items, values, events.version)


class SnapshotUpdate:
    """Update of snapshots with item values and new items of events, in any thread; `counts`: outcomes by generation.

    `failed` are generations where that failed, which is logged once.
    """

    def __init__(
        self, item_update_by_generation: Mapping[str, ItemUpdates], failed: set[str], now_s: float
    ) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._updates_by_generation = item_update_by_generation
        self._failed = failed
        self._now_s = now_s

    def into(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the values and new items; values of unknown attributes or items are ignored."""
        if (item_update := self._updates_by_generation.get(snapshot.generation)) is None:
            return snapshot
        # Anybody sends events: a generation that cannot take one over answers as it did before, and can be loaded.
        for apply_update in (self._with_values, self._with_new_items):
            try:
                snapshot = apply_update(snapshot, item_update)
            except Exception:
                if snapshot.generation not in self._failed:
                    self._failed.add(snapshot.generation)
                    log.exception(
                        "generation %s does not take over what events set", snapshot.generation
                    )
        return snapshot

    def _with_values(self, snapshot: Snapshot, item_update: ItemUpdates) -> Snapshot:
        if (filtering := snapshot.filtering) is None:
            return snapshot.with_filtering(None, item_update.values.until_number)
        values, of_new_items = list(item_update.values.values()), item_update.of_new_items.packed
        ordinals = snapshot.items.ordinals_of(
            [attribute_value.raw for attribute_value in values]
        ).tolist()
        item_values = [
            ItemValue(ordinal, attribute_value.attribute, attribute_value.value)
            for ordinal, attribute_value in zip(ordinals, values, strict=True)
            if ordinal >= 0
        ]
        changed_filtering, changed_columns = filtering.changed_by(item_values)
        counts = self.counts[snapshot.generation]
        pairs = zip(ordinals, values, strict=True)
        unknown = [
            at < 0 and attribute_value.raw not in of_new_items for at, attribute_value in pairs
        ]
        counts["unknown item"] = sum(unknown)
        counts["unknown attribute"] = changed_columns.unknown
        for reasons in changed_columns.unfit.values():
            counts.update(
                {reason: len(unfit_ordinals) for reason, unfit_ordinals in reasons.items()}
            )
        counts["set"] = len(values) - counts.total()
        return snapshot.with_filtering(changed_filtering, item_update.values.until_number)

    def _with_new_items(self, snapshot: Snapshot, item_update: ItemUpdates) -> Snapshot:
        tower = None if snapshot.events is None else snapshot.events.item_tower
        if tower is None:
            return snapshot
        values_by_item = {
            new_item.raw: item_update.of_new_items.of(new_item.raw)
            for new_item in item_update.new_items
        }
        new_items = tower.items(
            snapshot.items, item_update.new_items, values_by_item, snapshot.new_items, self._now_s
        )
        values = [values_by_item[new_item.raw] for new_item in new_items.items]
        filtering = snapshot.filtering and snapshot.filtering.with_new(values, new_items.vectors)
        return snapshot.with_new_items(new_items, filtering, item_update.version)
