"""New items that events brought: kept within bounds, and the vectors that a generation's models make of them."""

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
from cache.events.newer_events import VALUES_MAX, features_with
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.format.stream_position import Position
from cache.model.input_preparation import check_features, stack_features
from cache.model.new_items import NO_NEW_ITEMS, NewItem, NewItems, NextTry
from cache.model.tower import AnyTower, Tower, run_isolating_failures
from cache.model.tower_spec import InputSpec, TowerSpec

ITEM_TOWER: Final = "item_tower"
"""Name of the item tower among a manifest's models."""

ITEM_VECTORS: Final = "item_vectors"
"""Fact of a manifest: its items are a table of vectors besides the bundle, which takes a row for each new item."""

ITEM_COLUMN: Final = "item_column"
"""Fact of a manifest: the column of ids in its feature table of items, if a model of items takes it as a feature."""

NEW_VECTOR_ABS_MAX: Final = 65_504.0
"""Largest number of an item's vector that an event brought or made: scores far beyond all others would leave no list
any precision."""

TOWER_RETRIES_S: Final = (1.0, 8.0, 60.0)
"""Seconds until a retry of an input on which the tower raised: errors of memory and time pass, others never do. After
the last retry it is refused."""

_ENTITY_BYTES: Final = 180
"""Memory of an item besides its id and vector, about."""

_NEW_ITEMS_AT_ONCE: Final = 256

_OWN_ITEMS_LOOKED_AT: Final = 64
"""Own items whose vectors show whether there is a bound: reading all would take long."""

_FIXED_ITEMS_MESSAGE: Final = (
    "the item tower of the live generation takes an item's index, so its items are those of the bundle: train or "
    "import the bundle anew with the item, or let a tower compute its vector from features"
)


class NewItemEvents:
    """Items of events that have `features` or a `vector`, the newest `items_max` of them: the oldest are dropped first.

    Positions only grow. The features themselves are values of `AttributeEvents`, where later ones count as well.
    """

    def __init__(self, items_max: int = sys.maxsize) -> None:
        self.size_bytes = 0
        self.last = 0
        """Number of the newest position that was added."""
        self.version = 0
        """Number of changes made to the items so far; a copy with the same number is up to date."""
        self.evicted = 0
        """Number of items that were dropped to make room for newer ones."""
        self._items_max = items_max
        self._evicted_until = 0
        # In the order of the newest positions, newest last.
        self._item_by_raw: dict[bytes, NewItem] = {}

    def __len__(self) -> int:
        return len(self._item_by_raw)

    def __contains__(self, raw: bytes) -> bool:
        return raw in self._item_by_raw

    def add(self, position: Position, event: Event) -> bool:
        """Takes the next event in; False for one that was there, True also where it brings no item."""
        number = position.number
        if number <= self.last:
            return False
        self.last = number
        raw = event.item
        if raw is None or event.kind != "item" or not brings_item(event):
            return True
        vector = None if event.vector is None else np.array(event.vector, np.float32)
        previous_item = self._forgotten(raw)
        if vector is None and previous_item is not None:
            vector = previous_item.vector
        self._put(NewItem(raw, number, vector))
        self._evict()
        self.version += 1
        return True

    def list_items_after(self, number: int) -> list[NewItem]:
        """Items behind this position's number, in the order of their positions."""
        return [item for item in self._item_by_raw.values() if item.number > number]

    def drop_until(self, number: int) -> int:
        """Forgets items up to this position's number; how many they were."""
        dropped_ids = [raw for raw, item in self._item_by_raw.items() if item.number <= number]
        for raw in dropped_ids:
            self.forget(raw)
        return len(dropped_ids)

    def become(self, replacement: "NewItemEvents") -> None:
        """Take over the contents of `replacement`, which must not be used afterwards."""
        self._item_by_raw, self.size_bytes, self.last = (
            replacement._item_by_raw,
            replacement.size_bytes,
            replacement.last,
        )
        self._evict()
        self.version += 1

    def put_before(self, earlier_events: "NewItemEvents") -> None:
        """Add the items of `earlier_events`, of earlier positions, that are not among these."""
        newer_by_id = self._item_by_raw
        earlier = {
            raw: item for raw, item in earlier_events._item_by_raw.items() if raw not in newer_by_id
        }
        if not earlier:
            return
        self._item_by_raw = {}
        for item in sorted(
            [*earlier.values(), *newer_by_id.values()], key=lambda item: item.number
        ):
            self._item_by_raw[item.raw] = item
        self.size_bytes = sum(map(_size_bytes, self._item_by_raw.values()))
        self._evict()
        self.version += 1

    def forget(self, raw: bytes) -> None:
        """Forgets an item, for one that was erased."""
        if self._forgotten(raw) is not None:
            self.version += 1

    def _put(self, item: NewItem) -> None:
        self._item_by_raw[item.raw] = item
        self.size_bytes += _size_bytes(item)

    def _forgotten(self, raw: bytes) -> NewItem | None:
        item = self._item_by_raw.pop(raw, None)
        if item is not None:
            self.size_bytes -= _size_bytes(item)
        return item

    def _evict(self) -> None:
        while len(self._item_by_raw) > self._items_max:
            number = next(iter(self._item_by_raw.values())).number
            self._forgotten(next(iter(self._item_by_raw)))
            if number > self._evicted_until:  # not once more where the stream is read again
                self._evicted_until = number
                self.evicted += 1


def brings_item(event: Event) -> bool:
    """True if the event makes its item answerable."""
    return bool(event.features) or event.vector is not None


def _size_bytes(item: NewItem) -> int:
    vector = 0 if item.vector is None else item.vector.nbytes
    return _ENTITY_BYTES + len(item.raw) + vector


class UnfitNewItem(InvalidInput):
    """A new item that the models of a generation cannot answer with."""

    code = "unfit_item"


class FixedItems(UnfitNewItem):
    """A new item where the models know those alone that they were made of."""

    code = "fixed_items"


@dataclass(frozen=True, slots=True)
class NewItemInputs:
    """Input that makes an item answerable: `features` of the item tower, a vector of `dims` numbers, or neither.

    `vector_abs_max` is the largest number that its vector may have. The feature `id_column` (empty: none) is the item's
    own id, which the event names already.
    """

    features: tuple[InputSpec, ...] = ()
    dims: int = 0
    vector_abs_max: float = NEW_VECTOR_ABS_MAX
    id_column: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Input by a manifest's item tower."""
        if manifest.facts.get(ITEM_VECTORS):
            return cls(dims=manifest.items.dims)
        model = manifest.models.get(ITEM_TOWER)
        spec = None if model is None else TowerSpec.from_json(model.spec)
        if spec is None or len(spec.features) < len(spec.inputs):
            return cls()
        return cls(spec.features, id_column=manifest.facts.get(ITEM_COLUMN, ""))

    def check(self, event: Event) -> None:
        """Raises UnfitNewItem (`field`) for an event that brings an item which cannot be answered with."""
        if len(event.values) > VALUES_MAX:
            raise UnfitNewItem(
                f"it has {len(event.values)} features and attributes, {VALUES_MAX} of one item are kept",
                field="features",
            )
        if self.features:
            self._check_features(event)
        elif self.dims:
            if event.vector is None:
                raise UnfitNewItem(
                    "items of the live generation are a table of vectors, no tower makes one of features: send a "
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
                    f"its vector has a number of {largest:g}, {self.vector_abs_max:,.0f} at most is allowed: lists in "
                    "which it "
                    "stood would keep no precision for other scores",
                    field="vector",
                )
        else:
            raise FixedItems(
                _FIXED_ITEMS_MESSAGE, field="vector" if event.features is None else "features"
            )

    def _check_features(self, event: Event) -> None:
        named = {str(input_spec.column) for input_spec in self.features}
        columns = sorted(named - {self.id_column})
        requirement = f"the item tower of the live generation takes {', '.join(columns)}"
        if event.vector is not None:
            raise UnfitNewItem(
                f"{requirement} and makes the vector itself: send these as features, and no vector",
                field="vector",
            )
        features, item_id = event.features or {}, (event.item or b"").decode()
        if (repeated_id := features.get(self.id_column, item_id)) not in (
            item_id,
            _as_number(item_id),
        ):
            raise UnfitNewItem(
                f"features.{self.id_column} is {repeated_id!r}, and the event is of item {item_id!r}: leave that "
                "feature out, the item tower takes the item's id",
                field=f"features.{self.id_column}",
            )
        if missing := [column for column in columns if column not in features]:
            raise UnfitNewItem(
                f"{requirement}: {', '.join(missing)} is missing; send all of them with a new item, and what changes "
                "of one "
                "that is known as attributes",
                field="features",
            )
        try:
            check_features(
                self.features, self.with_id({name: features[name] for name in columns}, item_id)
            )
        except InvalidInput as error:
            field = f"features.{error.details.get('field')}"
            raise UnfitNewItem(f"{requirement}: {error.message}", field=field) from error

    def with_id(self, values: Mapping[str, Any], item_id: str) -> Mapping[str, Any]:
        """Values by column, with the item's id where a model takes it."""
        return with_item_id(values, item_id, self.features, self.id_column)


def with_item_id(
    values: Mapping[str, Any], item_id: str, inputs: Sequence[InputSpec], id_column: str
) -> Mapping[str, Any]:
    """Values that events set for an item, by column; its id, and nothing else, is that of the column of ids."""
    dtypes = {input_spec.dtype for input_spec in inputs if input_spec.column == id_column}
    if not dtypes:
        return values
    return {**values, id_column: item_id if dtypes == {"string"} else _as_number(item_id)}


def _as_number(item_id: str) -> int | str:
    """A whole number for the decimal form of one, else the id itself."""
    return int(item_id) if item_id.isdecimal() and item_id.isascii() else item_id


@dataclass(frozen=True, slots=True, eq=False)
class NewItemTower:
    """Item tower that computes vectors of new items as the night does; without a tower, events carry the vectors."""

    inputs: NewItemInputs
    tower: AnyTower | None = None

    @classmethod
    def open(
        cls, manifest: Manifest, root: Path, items: ItemTable, *, threads: int, cores: Sequence[int]
    ) -> Self:
        """Opens the item tower in fp32 where items are made of features; `items` are the generation's own.

        Where theirs go beyond NEW_VECTOR_ABS_MAX a tower's vectors are not bounded, and others by theirs, as by the
        night.
        """
        inputs = NewItemInputs.of(manifest)
        largest = float(np.abs(items.vectors[:_OWN_ITEMS_LOOKED_AT]).max(initial=0))
        if largest > NEW_VECTOR_ABS_MAX:
            inputs = replace(inputs, vector_abs_max=np.inf if inputs.features else largest)
        if not inputs.features:
            return cls(inputs)
        model = manifest.models[ITEM_TOWER]
        spec = TowerSpec.from_json(model.spec)
        tower = Tower.open(root / model.fp32.path, spec, threads=threads, cores=cores)
        return cls(inputs, tower)

    def items(
        self,
        table: ItemTable,
        candidate_items: Sequence[NewItem],
        values: Mapping[bytes, Mapping[str, Any]],
        previous: NewItems = NO_NEW_ITEMS,
        now_s: float = 0.0,
    ) -> NewItems:
        """New `candidate_items` that the generation's models can take; `now_s` is monotonic.

        `values` are what events set for each, by column. Vectors of `previous` whose inputs are the same stay. Anybody
        sends events: an item that the tower raises on costs the others nothing, and is tried again after
        TOWER_RETRIES_S.
        """
        known_mask = table.ordinals_of([item.raw for item in candidate_items]) >= 0
        new = [
            item
            for item, is_known in zip(candidate_items, known_mask.tolist(), strict=True)
            if not is_known
        ]
        keyed_inputs = [(item, *self._input(item, values.get(item.raw, {}))) for item in new]
        usable = [(item, input_key, row) for item, input_key, row in keyed_inputs if input_key]
        vector_by_input = dict(zip(previous.inputs, previous.vectors, strict=True))
        failed = dict(previous.failed)
        settled_inputs = (
            vector_by_input.keys()
            | previous.refused
            | {raw for raw, next_try in failed.items() if next_try.at > now_s}
        )
        fresh = list(
            {
                input_key: row for _, input_key, row in usable if input_key not in settled_inputs
            }.items()
        )
        for start in range(0, len(fresh), _NEW_ITEMS_AT_ONCE):
            chunk = fresh[start : start + _NEW_ITEMS_AT_ONCE]
            for (input_key, _), vector, has_raised in zip(
                chunk, *self._vectors([row for _, row in chunk]), strict=True
            ):
                last = failed.pop(input_key, NextTry(0, now_s))
                if not has_raised:
                    vector_by_input[input_key] = vector
                elif last.tries < len(TOWER_RETRIES_S):
                    failed[input_key] = NextTry(last.tries + 1, now_s + TOWER_RETRIES_S[last.tries])
        usable_keys = {input_key for _, input_key, _ in usable}
        failed = {
            input_key: next_try
            for input_key, next_try in failed.items()
            if input_key in usable_keys
        }
        refused = frozenset(
            input_key
            for input_key in usable_keys - failed.keys()
            if input_key not in vector_by_input or not self._fits(vector_by_input[input_key])
        )
        left_out = frozenset(item.raw for item, key, _ in usable if key in refused or key in failed)
        usable = [
            keyed_input
            for keyed_input in usable
            if keyed_input[1] not in refused and keyed_input[1] not in failed
        ]
        if not usable:
            return NewItems(table.count, refused=refused, failed=failed, left_out=left_out)
        vectors = np.ascontiguousarray(
            [vector_by_input[input_key] for _, input_key, _ in usable], np.float32
        )
        vectors.flags.writeable = False
        items = tuple(item for item, _, _ in usable)
        return NewItems(
            table.count,
            items,
            vectors,
            tuple(input_key for _, input_key, _ in usable),
            refused,
            failed,
            left_out,
        )

    def _fits(self, vector: NDArray[np.float32]) -> bool:
        return bool(
            np.isfinite(vector).all()
            and np.abs(vector).max(initial=0) <= self.inputs.vector_abs_max
        )

    def _input(self, item: NewItem, values: Mapping[str, Any]) -> tuple[bytes, Any]:
        """Return (key of the item's input, the input itself); the key is empty where no model can take the item."""
        if self.inputs.features:
            values = self.inputs.with_id(values, item.raw.decode())
            features = features_with({}, values, self.inputs.features)
            if features is None:
                return b"", None
            return orjson.dumps(features, option=orjson.OPT_SORT_KEYS), features
        if self.inputs.dims and item.vector is not None and len(item.vector) == self.inputs.dims:
            return item.vector.tobytes(), item.vector
        return b"", None

    def _vectors(self, rows: Sequence[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """(vectors, mask of the rows on which the tower raised)."""
        if self.tower is None:
            return np.array(rows, np.float32), np.zeros(len(rows), np.bool_)
        checked = [check_features(self.inputs.features, features) for features in rows]
        return run_isolating_failures(self.tower, {
            input_spec.name: stack_features(input_spec, [row[input_spec.name] for row in checked])
            for input_spec in self.inputs.features
        })  # fmt: skip
