"""New items that events brought, kept within bounds, and the vectors that a generation's models compute for them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.events.event import Event
from cache.events.newer_events import VALUES_PER_ENTITY_MAX, merge_features
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.format.stream_position import Position
from cache.model.input_preparation import check_features, stack_features
from cache.model.new_items import NO_NEW_ITEMS, NewItem, NewItems, NextTry
from cache.model.tower import AnyTower, Tower, run_isolating_failures
from cache.model.tower_spec import InputSpec, TowerSpec

ITEM_TOWER_MODEL: Final = "item_tower"
"""Name of the item tower among a manifest's models."""

ITEM_VECTORS_FACT: Final = "item_vectors"
"""Fact of a manifest: its items come from a table of vectors, and an event must bring a new item's vector."""

ITEM_COLUMN_FACT: Final = "item_column"
"""Fact of a manifest: the id column of its feature table of items, if an item model takes it as a feature."""

NEW_VECTOR_ABS_MAX: Final = 65_504.0
"""Largest absolute number in a new item's vector: far higher scores than all others would leave a list's other scores
without precision."""

TOWER_RETRY_PAUSES_S: Final = (1.0, 8.0, 60.0)
"""Seconds until each retry of an input on which the tower raised: errors of memory and time pass, others never do.
After the last retry the input is refused."""

_ITEM_OVERHEAD_BYTES: Final = 180
"""Approximate memory of an item besides its id and vector."""

_NEW_ITEMS_AT_ONCE: Final = 256

_SAMPLED_OWN_ITEMS: Final = 64
"""Number of the generation's own items whose vectors are checked for larger numbers; checking all would take long."""

_FIXED_ITEMS_MESSAGE: Final = (
    "the item tower of the live generation takes an item's index, so it cannot have new items: train or "
    "import the bundle again with the item, or use a tower that computes vectors from features"
)


class NewItemEvents:
    """Items that events brought with `features` or a `vector`; the newest `items_max` are kept.

    Events must be added in order of position. Features are kept in `AttributeEvents`, since later events may change
    them.
    """

    def __init__(self, items_max: int = sys.maxsize) -> None:
        self.size_bytes = 0
        self.last_number = 0
        """Number of the newest position that was added."""
        self.version = 0
        """Number of changes made to the items so far; a copy with the same number is up to date."""
        self.evicted_count = 0
        """Number of items that were dropped to make room for newer ones."""
        self._items_max = items_max
        self._evicted_until = 0
        # By newest position, newest last.
        self._item_by_id: dict[bytes, NewItem] = {}

    def __len__(self) -> int:
        return len(self._item_by_id)

    def __contains__(self, raw_id: bytes) -> bool:
        return raw_id in self._item_by_id

    def add(self, position: Position, event: Event) -> bool:
        """Add the next event; False if its position was added before, True even if it brings no item."""
        position_number = position.number
        if position_number <= self.last_number:
            return False
        self.last_number = position_number
        raw_id = event.item
        if raw_id is None or event.kind != "item" or not brings_item(event):
            return True
        vector = None if event.vector is None else np.array(event.vector, np.float32)
        previous_item = self._pop_item(raw_id)
        if vector is None and previous_item is not None:
            vector = previous_item.vector
        self._put(NewItem(raw_id, position_number, vector))
        self._evict()
        self.version += 1
        return True

    def list_items_after(self, position_number: int) -> list[NewItem]:
        """Return items after this position number, in order of position."""
        return [item for item in self._item_by_id.values() if item.position_number > position_number]

    def drop_until(self, position_number: int) -> int:
        """Forget items up to this position number; return how many were forgotten."""
        dropped_ids = [raw_id for raw_id, item in self._item_by_id.items() if item.position_number <= position_number]
        for raw_id in dropped_ids:
            self.forget(raw_id)
        return len(dropped_ids)

    def replace_contents(self, replacement: "NewItemEvents") -> None:
        """Take over the contents of `replacement`, which must not be used afterwards."""
        self._item_by_id, self.size_bytes, self.last_number = (
            replacement._item_by_id,
            replacement.size_bytes,
            replacement.last_number,
        )
        self._evict()
        self.version += 1

    def prepend(self, earlier_events: "NewItemEvents") -> None:
        """Add the items of `earlier_events`, whose positions are earlier, unless they are here already."""
        newer_by_id = self._item_by_id
        earlier_by_id = {
            raw_id: item for raw_id, item in earlier_events._item_by_id.items() if raw_id not in newer_by_id
        }
        if not earlier_by_id:
            return
        self._item_by_id = {}
        for item in sorted([*earlier_by_id.values(), *newer_by_id.values()], key=lambda item: item.position_number):
            self._item_by_id[item.raw_id] = item
        self.size_bytes = sum(map(_item_bytes, self._item_by_id.values()))
        self._evict()
        self.version += 1

    def forget(self, raw_id: bytes) -> None:
        """Forget the item, because it was erased."""
        if self._pop_item(raw_id) is not None:
            self.version += 1

    def _put(self, item: NewItem) -> None:
        self._item_by_id[item.raw_id] = item
        self.size_bytes += _item_bytes(item)

    def _pop_item(self, raw_id: bytes) -> NewItem | None:
        item = self._item_by_id.pop(raw_id, None)
        if item is not None:
            self.size_bytes -= _item_bytes(item)
        return item

    def _evict(self) -> None:
        while len(self._item_by_id) > self._items_max:
            position_number = next(iter(self._item_by_id.values())).position_number
            self._pop_item(next(iter(self._item_by_id)))
            if position_number > self._evicted_until:  # do not count it again if the stream is read again
                self._evicted_until = position_number
                self.evicted_count += 1


def brings_item(event: Event) -> bool:
    """Return whether the event brings its item's features or vector, so that answers can name the item."""
    return bool(event.features) or event.vector is not None


def _item_bytes(item: NewItem) -> int:
    vector_bytes = 0 if item.vector is None else item.vector.nbytes
    return _ITEM_OVERHEAD_BYTES + len(item.raw_id) + vector_bytes


class UnfitNewItem(InvalidInput):
    """The models of a generation cannot use a new item."""

    code = "unfit_item"


class FixedItems(UnfitNewItem):
    """The models of a generation cannot use any new item: they only know the items they were made from."""

    code = "fixed_items"


@dataclass(frozen=True, slots=True)
class NewItemInputs:
    """Input that an event must bring for a new item: tower `features`, a vector of `dims` numbers, or neither.

    `vector_abs_max` is the largest absolute number that its vector may contain. The feature `id_column` (empty: none)
    is the item's own id, which the event need not repeat.
    """

    features: tuple[InputSpec, ...] = ()
    dims: int = 0
    vector_abs_max: float = NEW_VECTOR_ABS_MAX
    id_column: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Build from a manifest's item tower."""
        if manifest.facts.get(ITEM_VECTORS_FACT):
            return cls(dims=manifest.items.dims)
        model = manifest.models.get(ITEM_TOWER_MODEL)
        spec = None if model is None else TowerSpec.from_json(model.spec)
        if spec is None or len(spec.features) < len(spec.inputs):
            return cls()
        return cls(spec.features, id_column=manifest.facts.get(ITEM_COLUMN_FACT, ""))

    def check(self, event: Event) -> None:
        """Raise UnfitNewItem (`field`) if the event brings an item that the generation's models cannot use."""
        if len(event.set_value_by_attribute) > VALUES_PER_ENTITY_MAX:
            raise UnfitNewItem(
                f"it has {len(event.set_value_by_attribute)} features and attributes, "
                f"at most {VALUES_PER_ENTITY_MAX} of one item "
                "are kept",
                field="features",
            )
        if self.features:
            self._check_features(event)
        elif self.dims:
            if event.vector is None:
                raise UnfitNewItem(
                    "items of the live generation come from a table of vectors, without a tower for features: send a "
                    f"vector of {self.dims} numbers",
                    field="features",
                )
            if len(event.vector) != self.dims:
                raise UnfitNewItem(
                    f"items of the live generation have vectors of {self.dims} numbers, not {len(event.vector)}",
                    field="vector",
                )
            if not (largest := max(map(abs, event.vector))) <= self.vector_abs_max:
                raise UnfitNewItem(
                    f"its vector has a number of {largest:g}, at most {self.vector_abs_max:,.0f} is allowed: lists "
                    "with it would have no precision left for other scores",
                    field="vector",
                )
        else:
            raise FixedItems(_FIXED_ITEMS_MESSAGE, field="vector" if event.features is None else "features")

    def _check_features(self, event: Event) -> None:
        feature_columns = {str(input_spec.column) for input_spec in self.features}
        columns = sorted(feature_columns - {self.id_column})
        requirement = f"the item tower of the live generation takes {', '.join(columns)}"
        if event.vector is not None:
            raise UnfitNewItem(
                f"{requirement} and computes the vector itself: send these as features, and no vector", field="vector"
            )
        features, item_id = event.features or {}, (event.item or b"").decode()
        if (repeated_id := features.get(self.id_column, item_id)) not in (item_id, _id_as_number(item_id)):
            raise UnfitNewItem(
                f"features.{self.id_column} is {repeated_id!r}, but the event's item is {item_id!r}: leave that "
                "feature out, the item's id is used",
                field=f"features.{self.id_column}",
            )
        if missing_columns := [column for column in columns if column not in features]:
            raise UnfitNewItem(
                f"{requirement}: {', '.join(missing_columns)} is missing; send all of them with a new item, and the "
                "changed values of a known item as attributes",
                field="features",
            )
        try:
            check_features(self.features, self.with_id({name: features[name] for name in columns}, item_id))
        except InvalidInput as error:
            field = f"features.{error.details.get('field')}"
            raise UnfitNewItem(f"{requirement}: {error.message}", field=field) from error

    def with_id(self, value_by_column: Mapping[str, Any], item_id: str) -> Mapping[str, Any]:
        """Return the values with the item's id added if a model takes it."""
        return with_item_id(value_by_column, item_id, self.features, self.id_column)


def with_item_id(
    value_by_column: Mapping[str, Any], item_id: str, input_specs: Sequence[InputSpec], id_column: str
) -> Mapping[str, Any]:
    """Return the values by column, with `id_column` set to the item's id; an event cannot set another value for it."""
    dtypes = {input_spec.dtype for input_spec in input_specs if input_spec.column == id_column}
    if not dtypes:
        return value_by_column
    return {**value_by_column, id_column: item_id if dtypes == {"string"} else _id_as_number(item_id)}


def _id_as_number(item_id: str) -> int | str:
    """Return the integer for a decimal id, else the id itself."""
    return int(item_id) if item_id.isdecimal() and item_id.isascii() else item_id


@dataclass(frozen=True, slots=True, eq=False)
class NewItemTower:
    """Item tower that computes vectors of new items as the night does; without one, events bring the vectors."""

    inputs: NewItemInputs
    tower: AnyTower | None = None

    @classmethod
    def open(
        cls, manifest: Manifest, generation_folder: Path, items: ItemTable, *, threads: int, cores: Sequence[int]
    ) -> Self:
        """Open the item tower in fp32 if items are computed from features; `items` are the generation's own.

        If their numbers exceed NEW_VECTOR_ABS_MAX, a tower's vectors are unbounded, and given vectors are bounded by
        the generation's largest number, as in the night.
        """
        inputs = NewItemInputs.of(manifest)
        largest_number = float(np.abs(items.vectors[:_SAMPLED_OWN_ITEMS]).max(initial=0))
        if largest_number > NEW_VECTOR_ABS_MAX:
            inputs = replace(inputs, vector_abs_max=np.inf if inputs.features else largest_number)
        if not inputs.features:
            return cls(inputs)
        model = manifest.models[ITEM_TOWER_MODEL]
        spec = TowerSpec.from_json(model.spec)
        tower = Tower.open(generation_folder / model.fp32.path, spec, threads=threads, cores=cores)
        return cls(inputs, tower)

    def compute_new_items(
        self,
        item_table: ItemTable,
        candidate_items: Sequence[NewItem],
        values_by_item: Mapping[bytes, Mapping[str, Any]],
        previous_items: NewItems = NO_NEW_ITEMS,
        now_s: float = 0.0,
    ) -> NewItems:
        """Compute the vectors of those `candidate_items` that the generation lacks and its models can take.

        `now_s` is monotonic. `values_by_item` has the values that events set for each item, by column. Vectors of
        `previous_items` with unchanged inputs are reused. Events are untrusted: an item on which the tower raises does
        not affect the others, and is tried again after TOWER_RETRY_PAUSES_S.
        """
        known_mask = item_table.ordinals_of([item.raw_id for item in candidate_items]) >= 0
        unknown_items = [
            item for item, is_known in zip(candidate_items, known_mask.tolist(), strict=True) if not is_known
        ]
        keyed_inputs = [(item, *self._item_input(item, values_by_item.get(item.raw_id, {}))) for item in unknown_items]
        usable_inputs = [(item, input_key, row) for item, input_key, row in keyed_inputs if input_key]
        vector_by_input = dict(zip(previous_items.input_keys, previous_items.vectors, strict=True))
        next_try_by_input = dict(previous_items.next_try_by_input)
        settled_inputs = (
            vector_by_input.keys()
            | previous_items.refused_inputs
            | {raw for raw, next_try in next_try_by_input.items() if next_try.retry_at_s > now_s}
        )
        pending_inputs = list(
            {input_key: row for _, input_key, row in usable_inputs if input_key not in settled_inputs}.items()
        )
        for start in range(0, len(pending_inputs), _NEW_ITEMS_AT_ONCE):
            chunk = pending_inputs[start : start + _NEW_ITEMS_AT_ONCE]
            for (input_key, _), vector, has_raised in zip(
                chunk, *self._run_tower([row for _, row in chunk]), strict=True
            ):
                last_try = next_try_by_input.pop(input_key, NextTry(0, now_s))
                if not has_raised:
                    vector_by_input[input_key] = vector
                elif last_try.try_count < len(TOWER_RETRY_PAUSES_S):
                    next_try_by_input[input_key] = NextTry(
                        last_try.try_count + 1, now_s + TOWER_RETRY_PAUSES_S[last_try.try_count]
                    )
        usable_keys = {input_key for _, input_key, _ in usable_inputs}
        next_try_by_input = {
            input_key: next_try for input_key, next_try in next_try_by_input.items() if input_key in usable_keys
        }
        refused_inputs = frozenset(
            input_key
            for input_key in usable_keys - next_try_by_input.keys()
            if input_key not in vector_by_input or not self._is_usable_vector(vector_by_input[input_key])
        )
        left_out_ids = frozenset(
            item.raw_id for item, key, _ in usable_inputs if key in refused_inputs or key in next_try_by_input
        )
        usable_inputs = [
            keyed_input
            for keyed_input in usable_inputs
            if keyed_input[1] not in refused_inputs and keyed_input[1] not in next_try_by_input
        ]
        if not usable_inputs:
            return NewItems(
                item_table.count,
                refused_inputs=refused_inputs,
                next_try_by_input=next_try_by_input,
                left_out_ids=left_out_ids,
            )
        vectors = np.ascontiguousarray([vector_by_input[input_key] for _, input_key, _ in usable_inputs], np.float32)
        vectors.flags.writeable = False
        items = tuple(item for item, _, _ in usable_inputs)
        return NewItems(
            item_table.count,
            items,
            vectors,
            tuple(input_key for _, input_key, _ in usable_inputs),
            refused_inputs,
            next_try_by_input,
            left_out_ids,
        )

    def _is_usable_vector(self, item_vector: NDArray[np.float32]) -> bool:
        return bool(np.isfinite(item_vector).all() and np.abs(item_vector).max(initial=0) <= self.inputs.vector_abs_max)

    def _item_input(self, item: NewItem, value_by_column: Mapping[str, Any]) -> tuple[bytes, Any]:
        """Return (key of the item's input, the input); the key is empty if no model can take the item."""
        if self.inputs.features:
            value_by_column = self.inputs.with_id(value_by_column, item.raw_id.decode())
            features = merge_features({}, value_by_column, self.inputs.features)
            if features is None:
                return b"", None
            return orjson.dumps(features, option=orjson.OPT_SORT_KEYS), features
        if self.inputs.dims and item.vector is not None and len(item.vector) == self.inputs.dims:
            return item.vector.tobytes(), item.vector
        return b"", None

    def _run_tower(self, input_rows: Sequence[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return (vectors, mask of the rows on which the tower raised)."""
        if self.tower is None:
            return np.array(input_rows, np.float32), np.zeros(len(input_rows), np.bool_)
        feature_rows = [check_features(self.inputs.features, features) for features in input_rows]
        return run_isolating_failures(self.tower, {
            input_spec.name: stack_features(input_spec, [row[input_spec.name] for row in feature_rows])
            for input_spec in self.inputs.features
        })  # fmt: skip
