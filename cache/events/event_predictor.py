"""Answers that include newer events, computed as the next night would: merged history, fp32 tower, exact search.

Synchronous and thread-safe.
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
from cache.events.newer_events import UserEvent, merge_features, usable_values
from cache.format.ids import FeatureValue
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import FEATURE_ONLY_USERS_FACT, Manifest, Table
from cache.format.seen_items import SeenItems, UserInput
from cache.format.stream_position import Position
from cache.model.input_preparation import LiveInput, PreparedInput, check_features, keep_last_occurrences
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
    """Interactions of a user: item ordinals int64 (-1: unknown item), and times in microseconds since 1970."""

    item_ordinals: NDArray[np.int64]
    times_us: NDArray[np.int64]


class MergedHistory(NamedTuple):
    """Merged history of a user: ordinals int64 for the model, oldest first, and ordinals of all items seen."""

    model_history: NDArray[np.int64]
    seen_items: NDArray[np.int64]


def merge_histories(
    published_histories: Sequence[TimedItems], newer_events: Sequence[TimedItems], history_limit: int
) -> list[MergedHistory]:
    """Merge each user's published history with the events after its position, in the same way as a night.

    Each of `published_histories` has its items oldest first, each item once, with its latest time; `newer_events` are
    in order of position. Interactions are sorted by time; those with equal times keep their order. If an item recurs,
    its last interaction counts. `model_history` has the newest `history_limit` items. Merge many users in one call:
    numpy's cost per call is then paid once.
    """
    histories_and_events = [
        timed_items for pair in zip(published_histories, newer_events, strict=True) for timed_items in pair
    ]
    if not histories_and_events:
        return []
    ordinals = np.concatenate([timed_items.item_ordinals for timed_items in histories_and_events])
    times_us = np.concatenate([timed_items.times_us for timed_items in histories_and_events])
    row_counts = [
        len(history.item_ordinals) + len(newer_items.item_ordinals)
        for history, newer_items in zip(published_histories, newer_events, strict=True)
    ]
    user_rows = np.repeat(np.arange(len(row_counts)), row_counts)
    time_order = np.lexsort((times_us, user_rows))
    ordinals, user_rows = ordinals[time_order], user_rows[time_order]
    # The factor leaves room for -1: no pair collides with another user's.
    user_item_pairs = user_rows * (int(ordinals.max(initial=0)) + 2) + ordinals
    # `np.unique` would double the time for one user.
    rows_by_pair = user_item_pairs.argsort(kind="stable")
    sorted_pairs = user_item_pairs[rows_by_pair]
    last_mask = np.ones(len(sorted_pairs), np.bool_)
    np.not_equal(sorted_pairs[1:], sorted_pairs[:-1], out=last_mask[:-1])
    latest_rows = rows_by_pair[last_mask]
    latest_rows.sort()
    latest_rows = latest_rows[ordinals[latest_rows] >= 0]
    ordinals, history_ends = (
        ordinals[latest_rows],
        user_rows[latest_rows].searchsorted(np.arange(len(row_counts) + 1)).tolist(),
    )
    return [
        MergedHistory(ordinals[max(start, end - history_limit) : end], ordinals[start:end])
        for start, end in pairwise(history_ends)
    ]


class EventInput(NamedTuple):
    """Newer events of a user, and the position of the user's nightly input in its directory; -1: no nightly input.

    For a user without a record and without an input that the model takes, `caller_input` replaces the nightly input.
    `user_attribute_values` are attributes that events set for the user. If an event's item is among the `new_items`, it
    counts as it will in the next night.
    """

    user_position: int
    events: tuple[UserEvent, ...]
    caller_input: LiveInput | None = None
    user_attribute_values: Mapping[str, Any] = MappingProxyType({})
    new_items: NewItems = NO_NEW_ITEMS


@dataclass(frozen=True, slots=True, eq=False)
class EventPredictor:
    """Full-precision models of one generation, for answers that include newer events."""

    predictor: Predictor
    items: ItemTable
    seen_items: SeenItems
    history_limit: int
    spec_by_table: Mapping[str, TowerSpec]
    tables: Mapping[str, Table]
    scorers: Mapping[Metric, Scorer]
    """Exact search over the items, by metric; empty if the vectors take too much memory."""
    night_answers_without_history: bool
    """True if a night answers a user without a history from features alone."""

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        generation_folder: Path,
        items: ItemTable,
        seen_items: SeenItems,
        predictor: Predictor,
        *,
        exact_search_bytes_max: int,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> Self | None:
        """Open the user models in fp32, in addition to those of `predictor`.

        Returns None if newer events change no answers.
        """
        tables = {name: manifest.tables[name] for name in features_by_changed_table(manifest)}
        tables = {name: table for name, table in tables.items() if predictor.supports(name)}
        if not tables or manifest.events is None:
            return None
        model_by_table = {name: str(table.producer.model) for name, table in tables.items()}
        models = {model_name: manifest.models[model_name] for model_name in set(model_by_table.values())}
        fp32_predictor = predictor.with_fp32_models(models, generation_folder, threads=threads, cores=cores)
        metrics = {
            manifest.indexes[str(table.producer.index)].metric for table in tables.values() if table.kind == "topk"
        }
        scorers: dict[Metric, Scorer] = {}
        if items.count and len(metrics) * items.vectors.nbytes <= exact_search_bytes_max:
            scorers = {metric: Scorer.of(items.vectors, metric) for metric in metrics}
        specs = {name: TowerSpec.from_json(manifest.models[model].spec) for name, model in model_by_table.items()}
        history_limit = manifest.events.history_limit
        night_answers_without_history = bool(manifest.facts.get(FEATURE_ONLY_USERS_FACT, False))
        return cls(
            fp32_predictor, items, seen_items, history_limit, specs, tables, scorers, night_answers_without_history
        )

    def supports(self, table: str) -> bool:
        """True if newer events change the table's answers and this predictor can compute them."""
        return table in self.tables

    def prepare_all(self, table: str, inputs: Sequence[EventInput]) -> list[PreparedInput | InvalidInput | None]:
        """Prepare many inputs at once; None for an input that does not suffice for the table's model."""
        events = [event for event_input in inputs for event in event_input.events]
        item_ids = [event.item for event in events]
        ordinals, item_count = self.items.ordinals_of(item_ids), self.items.count
        times_us = np.array([event.at_us for event in events], np.int64)
        event_ends = list(accumulate((len(event_input.events) for event_input in inputs), initial=0))
        newer_items = [
            TimedItems(
                event_input.new_items.item_numbers_of(item_ids[start:end], ordinals[start:end]), times_us[start:end]
            )
            for event_input, (start, end) in zip(inputs, pairwise(event_ends), strict=True)
        ]
        user_inputs = [self._input_without_events(event_input) for event_input in inputs]
        merged_histories = merge_histories(
            [TimedItems(user_input.item_ordinals, user_input.times_us) for user_input in user_inputs],
            newer_items,
            self.history_limit,
        )
        history_ordinals = np.concatenate([_NO_ORDINALS, *(history.model_history for history in merged_histories)])
        # A new item counts towards the history limit, but the model does not know it: the same holds in the next night.
        indices = self.items.model_indices_of(Ordinals(np.where(history_ordinals < item_count, history_ordinals, -1)))
        prepared_inputs: list[PreparedInput | InvalidInput | None] = []
        end = 0
        for event_input, user_input, history in zip(inputs, user_inputs, merged_histories, strict=True):
            start, end = end, end + len(history.model_history)
            try:
                interacted_items = history.seen_items[history.seen_items < item_count]
                if event_input.caller_input is not None and event_input.user_position >= 0:
                    interacted_items = np.union1d(
                        interacted_items, self.seen_items.ordinals_of(event_input.user_position)
                    )
                prepared_inputs.append(
                    self._prepare_one(table, event_input, user_input, indices[start:end], interacted_items)
                )
            except InvalidInput as error:
                prepared_inputs.append(
                    error.with_traceback(None)
                )  # break the reference cycle: the traceback holds this list
        return prepared_inputs

    def has_input(self, table: str, event_input: EventInput) -> bool:
        """True if the table's model takes the input of this user."""
        return isinstance(self.prepare_all(table, [event_input])[0], PreparedInput)

    def predict(
        self,
        table: str,
        prepared_inputs: Sequence[PreparedInput],
        fingerprints: Sequence[int],
        scored_at: int,
        eligible_by_row: Sequence[EligibleNewItems] = (),
    ) -> list[bytes]:
        """Predict one record per input, flagged live, and approximate if its list came from the index.

        Lists include the new items that `eligible_by_row` allows for each input. Blocked items stay in the list, as in
        a night's list; callers remove them. Raises UnfitValue.
        """
        user_vectors, manifest_table = self.predictor.vectors(prepared_inputs), self.tables[table]
        if manifest_table.kind != "topk":
            return self.predictor.numbers(table, user_vectors, fingerprints, scored_at)
        search = self.predictor.search(table)
        metric = search.searcher.metric
        scorer = self.scorers.get(metric)
        if scorer is None:
            ranked = search.lists(prepared_inputs, user_vectors, _NO_ORDINALS)
            ranked = merge_new_items(ranked, user_vectors, eligible_by_row, metric, manifest_table.layout)
            return self.predictor.lists(table, ranked, fingerprints, scored_at, record_flags=FLAG_APPROXIMATE)
        exclusions = Histories.of([prepared.excluded_ordinals for prepared in prepared_inputs])
        ranked = scorer.top(user_vectors, manifest_table.layout.width, exclusions, threads=1)
        ranked = merge_new_items(ranked, user_vectors, eligible_by_row, metric, manifest_table.layout)
        return self.predictor.lists(table, ranked, fingerprints, scored_at)

    def warm(self) -> None:
        """Run every table once, so that no request pays the cost of a first run."""
        for name, spec in self.spec_by_table.items():
            if not self.items.count:
                continue
            blank_input = PreparedInput(name, np.zeros(1, np.int64), spec.blank_features(), -1, _NO_ORDINALS, 0)
            self.predict(name, [blank_input], [0], 0)

    def _prepare_one(
        self,
        table: str,
        event_input: EventInput,
        user_input: UserInput,
        model_indices: NDArray[np.int64],
        interacted_items: NDArray[np.int64],
    ) -> PreparedInput | None:
        spec, history = self.spec_by_table[table], model_indices[model_indices >= 0]
        is_answered = bool(len(history)) or (self.night_answers_without_history and spec.features)
        if spec.history is not None and not is_answered:
            return None
        features: Mapping[str, FeatureValue] = {}
        if spec.features:
            newer_values = event_input.user_attribute_values
            if event_input.caller_input is not None:  # a value that events cleared does not hide one that was sent
                newer_values = usable_values(newer_values, spec.features)
            unchecked_features = merge_features(user_input.features, newer_values, spec.features)
            if unchecked_features is None:
                return None
            features = check_features(spec.features, unchecked_features)
        return PreparedInput(table, history, features, -1, interacted_items, 0)

    def _input_without_events(self, event_input: EventInput) -> UserInput:
        """Return the user's input without the events."""
        if event_input.user_position >= 0 and event_input.caller_input is None:
            return self.seen_items.input_of(event_input.user_position)
        live_input = event_input.caller_input or LiveInput()
        item_ordinals = self.items.ordinals_of(keep_last_occurrences(live_input.history or ()))
        known_items = item_ordinals[item_ordinals >= 0]
        return UserInput(known_items, np.full(len(known_items), _LONG_AGO_US), dict(live_input.features or {}))


def features_by_changed_table(manifest: Manifest) -> dict[str, tuple[InputSpec, ...]]:
    """Return the user tables whose answers newer events change, with the features that their models take.

    These are tables of lists, and tables computed from a history or from features. A list from a vector that the user's
    source provides does not change: `GenerationEvents.changes_answer` handles these users.
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
    """Events that a generation includes, up to a position number, and the tables that later events change.

    `features_by_changed_table` has, for each table, the features that its model takes: other attributes of a user
    change no answer. `predictor` is None without a working model. Lists of users with given vectors are not recomputed.
    """

    until_position_number: int
    features_by_changed_table: Mapping[str, Sequence[InputSpec]]
    predictor: EventPredictor | None = None
    item_tower: NewItemTower | None = None
    """Computes vectors of new items; None without working models."""

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
        until_position_number = Position.parse(manifest.events.until).number
        return cls(until_position_number, features_by_changed_table(manifest))

    def with_models(
        self,
        manifest: Manifest,
        generation_folder: Path,
        items: ItemTable,
        seen_items: SeenItems,
        predictor: Predictor,
        *,
        exact_search_bytes_max: int,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> Self:
        """Return a copy with warmed-up fp32 models, in addition to those of `predictor`."""
        event_predictor = EventPredictor.open(
            manifest, generation_folder, items, seen_items, predictor,
            exact_search_bytes_max=exact_search_bytes_max, threads=threads, cores=cores,
        )  # fmt: skip
        if event_predictor is not None:
            event_predictor.warm()
        tower = NewItemTower.open(manifest, generation_folder, items, threads=threads, cores=cores)
        return replace(self, predictor=event_predictor, item_tower=tower)

    @property
    def new_item_inputs(self) -> NewItemInputs | None:
        """Input that an event must bring for a new item; None without working models."""
        return None if self.item_tower is None else self.item_tower.inputs

    def can_compute_answer(self, table: Table, user_position: int) -> bool:
        """Return whether the answer for the user at this position (-1: none) can be computed with newer events."""
        if self.predictor is None or not self.predictor.supports(table.name):
            return False
        is_list_of_known = table.kind == "topk" and user_position >= 0
        return not (is_list_of_known and self.predictor.seen_items.has_brought_vector(user_position))

    def has_input(self, table: Table, event_input: EventInput) -> bool:
        """Return whether a user's nightly input and newer events suffice for the table's model."""
        if event_input.user_position < 0:
            return False
        return (
            self.predictor is None
            or not self.predictor.supports(table.name)
            or (self.predictor.has_input(table.name, event_input))
        )

    def changes_answer(self, table: Table, user_position: int, seen_items: SeenItems | None) -> bool:
        """Return whether newer events change the table's answer for the user at this position (-1: none).

        A night uses a user's given vector unchanged, whatever the user's interactions are.
        """
        if table.name not in self.features_by_changed_table:
            return False
        is_vector_of_known = table.kind == "vector" and user_position >= 0 and seen_items is not None
        return not (is_vector_of_known and seen_items is not None and seen_items.has_brought_vector(user_position))
