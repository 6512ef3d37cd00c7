"""Answers with newer events, as the next night would compute them: merged history, fp32 tower, exact search.

Synchronous, and thread-safe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.events.new_items import NewItemInputs, NewItemTower
from cache.events.newer_events import UserEvent, features_with
from cache.format.ids import FeatureValue
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import FEATURED_USERS, Manifest, Table
from cache.format.seen_items import SeenItems, UserInput
from cache.format.stream_position import Position
from cache.model.input_preparation import (
    LiveInput,
    PreparedInput,
    check_features,
    keep_last_occurrences,
)
from cache.model.new_items import NO_NEW_ITEMS, EligibleNewItems, NewItems, merge_new_items
from cache.model.predictor import Predictor
from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.records import FLAG_APPROXIMATE
from cache.topk.topk import Scorer

_LONG_AGO_US = -(1 << 62)
_NO_ORDINALS = np.empty(0, np.int64)


class TimedItems(NamedTuple):
    """Rows of a user: ordinals int64, -1 for an item that the generation does not know, and when each happened, µs."""

    items: NDArray[np.int64]
    times: NDArray[np.int64]


class MergedHistory(NamedTuple):
    """History int64, oldest first, as models are given it, and all items int64 that the user ever had."""

    model_history: NDArray[np.int64]
    seen_items: NDArray[np.int64]


def merge_histories(
    published_histories: Sequence[TimedItems], events: Sequence[TimedItems], limit: int
) -> list[MergedHistory]:
    """Merge the published history of each user with the events after its position, as a night groups rows.

    Of each user `published_histories` has the items oldest first, each once, with when it happened last; `events` are
    in the order of their positions. Rows are ordered by time, those of one time as they came; of an item that comes
    again the last row counts; models are given the newest `limit` items. Many users at once pay the fixed cost of
    numpy's calls once.
    """
    parts = [
        timed_items
        for pair in zip(published_histories, events, strict=True)
        for timed_items in pair
    ]
    if not parts:
        return []
    items = np.concatenate([timed_items.items for timed_items in parts])
    times = np.concatenate([timed_items.times for timed_items in parts])
    lengths = [
        len(history.items) + len(after.items)
        for history, after in zip(published_histories, events, strict=True)
    ]
    users = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((times, users))
    items, users = items[order], users[order]
    # So wide that -1 is nobody else's item either.
    pairs = users * (int(items.max(initial=0)) + 2) + items
    # Not by `np.unique`: for one user its fixed cost is that of everything else here.
    alike = pairs.argsort(kind="stable")
    placed = pairs[alike]
    is_last = np.ones(len(placed), np.bool_)
    np.not_equal(placed[1:], placed[:-1], out=is_last[:-1])
    latest_rows = alike[is_last]
    latest_rows.sort()
    latest_rows = latest_rows[items[latest_rows] >= 0]
    items, ends = (
        items[latest_rows],
        users[latest_rows].searchsorted(np.arange(len(lengths) + 1)).tolist(),
    )
    return [
        MergedHistory(items[max(start, end - limit) : end], items[start:end])
        for start, end in pairwise(ends)
    ]


class EventInput(NamedTuple):
    """Newer events of a user, and the position of the user's nightly input in its directory; -1: no nightly input.

    `caller_input` replaces the nightly input, before the events, for a user without a record and without an input that
    the model takes. `values` are attributes that events set for the user. Items of events that are among the
    `new_items` count as in the next night.
    """

    position: int
    events: tuple[UserEvent, ...]
    caller_input: LiveInput | None = None
    values: Mapping[str, Any] = MappingProxyType({})
    new_items: NewItems = NO_NEW_ITEMS


@dataclass(frozen=True, slots=True, eq=False)
class EventPredictor:
    """Models of one generation that newer events go through, in full precision."""

    predictor: Predictor
    items: ItemTable
    seen_items: SeenItems
    history_limit: int
    specs: Mapping[str, TowerSpec]
    tables: Mapping[str, Table]
    scorers: Mapping[Metric, Scorer]
    """Exact search over the items, by metric; empty if the vectors take too much memory."""
    answers_without_history: bool
    """True if a night answers a user without a history by features alone."""

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        root: Path,
        items: ItemTable,
        seen_items: SeenItems,
        predictor: Predictor,
        *,
        exact_bytes: int,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> Self | None:
        """Open the user models in fp32, besides those of `predictor`; None if newer events change no answers."""
        tables = {name: manifest.tables[name] for name in tables_changed(manifest)}
        tables = {name: table for name, table in tables.items() if predictor.supports(name)}
        if not tables or manifest.events is None:
            return None
        names = {name: str(table.producer.model) for name, table in tables.items()}
        models = {model_name: manifest.models[model_name] for model_name in set(names.values())}
        exact = predictor.with_fp32_models(models, root, threads=threads, cores=cores)
        metrics = {
            manifest.indexes[str(table.producer.index)].metric
            for table in tables.values()
            if table.kind == "topk"
        }
        scorers: dict[Metric, Scorer] = {}
        if items.count and len(metrics) * items.vectors.nbytes <= exact_bytes:
            scorers = {metric: Scorer.of(items.vectors, metric) for metric in metrics}
        specs = {
            name: TowerSpec.from_json(manifest.models[model].spec) for name, model in names.items()
        }
        history_limit = manifest.events.history_limit
        without = bool(manifest.facts.get(FEATURED_USERS, False))
        return cls(exact, items, seen_items, history_limit, specs, tables, scorers, without)

    def supports(self, table: str) -> bool:
        """True if newer events change the table's answers and this predictor can compute them."""
        return table in self.tables

    def prepare_all(
        self, table: str, inputs: Sequence[EventInput]
    ) -> list[PreparedInput | InvalidInput | None]:
        """Prepares many inputs at once; None for one that is not enough for the table's model."""
        events = [event for event_input in inputs for event in event_input.events]
        raws = [event.item for event in events]
        ordinals, count = self.items.ordinals_of(raws), self.items.count
        times = np.array([event.at_us for event in events], np.int64)
        ends = list(accumulate((len(event_input.events) for event_input in inputs), initial=0))
        newer_items = [
            TimedItems(
                event_input.new_items.numbers_of(raws[start:end], ordinals[start:end]),
                times[start:end],
            )
            for event_input, (start, end) in zip(inputs, pairwise(ends), strict=True)
        ]
        bases = [self._base(event_input) for event_input in inputs]
        merged = merge_histories(
            [TimedItems(base.items, base.times) for base in bases], newer_items, self.history_limit
        )
        history_ordinals = np.concatenate(
            [_NO_ORDINALS, *(history.model_history for history in merged)]
        )
        # A new item takes its place among the newest, and the model knows none: as where the next night has it.
        indices = self.items.to_model(
            Ordinals(np.where(history_ordinals < count, history_ordinals, -1))
        )
        prepared_inputs: list[PreparedInput | InvalidInput | None] = []
        end = 0
        for event_input, base, history in zip(inputs, bases, merged, strict=True):
            start, end = end, end + len(history.model_history)
            try:
                interacted_items = history.seen_items[history.seen_items < count]
                if event_input.caller_input is not None and event_input.position >= 0:
                    interacted_items = np.union1d(
                        interacted_items, self.seen_items.of(event_input.position)
                    )
                prepared_inputs.append(
                    self._prepared(table, event_input, base, indices[start:end], interacted_items)
                )
            except InvalidInput as error:
                prepared_inputs.append(
                    error.with_traceback(None)
                )  # which holds this list, and so itself
        return prepared_inputs

    def has_input(self, table: str, of_user: EventInput) -> bool:
        """True if the table's model takes the input of this user."""
        return isinstance(self.prepare_all(table, [of_user])[0], PreparedInput)

    def predict(
        self,
        table: str,
        batch: Sequence[PreparedInput],
        fingerprints: Sequence[int],
        scored_at: int,
        new: Sequence[EligibleNewItems] = (),
    ) -> list[bytes]:
        """Predicts one record per input, marked live, and approximate where the index found the list.

        Lists have the `new` items of each input among them. What is blocked stays in it, as in a night's list: whoever
        answers leaves it out. Raises UnfitValue.
        """
        outputs, manifest_table = self.predictor.vectors(batch), self.tables[table]
        if manifest_table.kind != "topk":
            return self.predictor.numbers(table, outputs, fingerprints, scored_at)
        search = self.predictor.search(table)
        metric = search.searcher.metric
        scorer = self.scorers.get(metric)
        if scorer is None:
            ranked = search.lists(batch, outputs, _NO_ORDINALS)
            ranked = merge_new_items(ranked, outputs, new, metric, manifest_table.layout)
            return self.predictor.lists(
                table, ranked, fingerprints, scored_at, flags=FLAG_APPROXIMATE
            )
        exclusions = Histories.of([prepared.excluded for prepared in batch])
        ranked = scorer.top(outputs, manifest_table.layout.width, exclusions, threads=1)
        ranked = merge_new_items(ranked, outputs, new, metric, manifest_table.layout)
        return self.predictor.lists(table, ranked, fingerprints, scored_at)

    def warm(self) -> None:
        """Run every table once, so that no request pays for the first time."""
        for name, spec in self.specs.items():
            if not self.items.count:
                continue
            blank = PreparedInput(
                name, np.zeros(1, np.int64), spec.blank_features(), -1, _NO_ORDINALS, 0
            )
            self.predict(name, [blank], [0], 0)

    def _prepared(
        self,
        table: str,
        event_input: EventInput,
        base: UserInput,
        indices: NDArray[np.int64],
        interacted_items: NDArray[np.int64],
    ) -> PreparedInput | None:
        spec, history = self.specs[table], indices[indices >= 0]
        is_answered = bool(len(history)) or (self.answers_without_history and spec.features)
        if spec.history is not None and not is_answered:
            return None
        features: Mapping[str, FeatureValue] = {}
        if spec.features:
            unchecked_features = features_with(base.features, event_input.values, spec.features)
            if unchecked_features is None:
                return None
            features = check_features(spec.features, unchecked_features)
        return PreparedInput(table, history, features, -1, interacted_items, 0)

    def _base(self, event_input: EventInput) -> UserInput:
        """Return the user's input without the events."""
        if event_input.position >= 0 and event_input.caller_input is None:
            return self.seen_items.input_of(event_input.position)
        live_input = event_input.caller_input or LiveInput()
        items = self.items.ordinals_of(keep_last_occurrences(live_input.history or ()))
        known_items = items[items >= 0]
        return UserInput(
            known_items, np.full(len(known_items), _LONG_AGO_US), dict(live_input.features or {})
        )


def tables_changed(manifest: Manifest) -> dict[str, tuple[InputSpec, ...]]:
    """Return the user tables whose answers newer events change, with the features that their models take.

    These are lists, and tables computed from a history or from features. A vector that a user brought along does not
    change: `GenerationEvents.changes` tells these users apart.
    """
    features_by_table = {}
    for name, table in manifest.tables.items():
        model = manifest.models.get(str(table.producer.model))
        if table.entity != "user" or model is None:
            continue
        spec = TowerSpec.from_json(model.spec)
        is_changed = spec.history is not None or bool(spec.features)
        if table.kind == "topk" or is_changed:
            features_by_table[name] = tuple(spec.features)
    return features_by_table


@dataclass(frozen=True, slots=True, eq=False)
class GenerationEvents:
    """Events of a generation, up to position number `until_number`, and the tables whose answers later events change.

    `tables` lists for each table the features that its model takes: other attributes of a user change no answer.
    `predictor` is None without a working model. Lists of users who brought their vectors along are not computed.
    """

    until_number: int
    tables: Mapping[str, Sequence[InputSpec]]
    predictor: EventPredictor | None = None
    item_tower: NewItemTower | None = None
    """Makes vectors of new items; None without working models."""

    @classmethod
    def of(cls, manifest: Manifest, namespace: str = "") -> Self | None:
        """Build from a manifest, without models; None if it includes no events of the namespace's stream.

        An empty `namespace` means the manifest's own.
        """
        if manifest.events is None:
            return None
        own_namespace = manifest.namespace
        if (manifest.events.namespace or own_namespace) != (namespace or own_namespace):
            return None
        until_number = Position.parse(manifest.events.until).number
        return cls(until_number, tables_changed(manifest))

    def opened(
        self,
        manifest: Manifest,
        root: Path,
        items: ItemTable,
        seen_items: SeenItems,
        predictor: Predictor,
        *,
        exact_bytes: int,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> Self:
        """Return a copy with warmed-up models in fp32, besides those of `predictor`."""
        exact = EventPredictor.open(
            manifest, root, items, seen_items, predictor, exact_bytes=exact_bytes, threads=threads, cores=cores
        )  # fmt: skip
        if exact is not None:
            exact.warm()
        tower = NewItemTower.open(manifest, root, items, threads=threads, cores=cores)
        return replace(self, predictor=exact, item_tower=tower)

    @property
    def new_item_inputs(self) -> NewItemInputs | None:
        """Input that makes an unknown item answerable; None without working models."""
        return None if self.item_tower is None else self.item_tower.inputs

    def computes(self, table: Table, position: int) -> bool:
        """True if the table's answer for the user at this position (-1: none) can be computed from newer events."""
        if self.predictor is None or not self.predictor.supports(table.name):
            return False
        is_list_of_known = table.kind == "topk" and position >= 0
        return not (is_list_of_known and self.predictor.seen_items.brought_vector(position))

    def has_input(self, table: Table, of_user: EventInput) -> bool:
        """True if the night's input of a user and the newer events suffice for the table's model."""
        if of_user.position < 0:
            return False
        return (
            self.predictor is None
            or not self.predictor.supports(table.name)
            or (self.predictor.has_input(table.name, of_user))
        )

    def changes(self, table: Table, position: int, seen_items: SeenItems | None) -> bool:
        """True if newer events change the table's answer for the user at this position (-1: none).

        A night takes a vector that the user brought along as it is, whatever the user did.
        """
        if table.name not in self.tables:
            return False
        is_vector_of_known = table.kind == "vector" and position >= 0 and seen_items is not None
        return not (
            is_vector_of_known and seen_items is not None and seen_items.brought_vector(position)
        )
