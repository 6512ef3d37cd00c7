"""Vectors of new items, from what a generation's models take of an item that no night has seen. Thread-safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.events.attribute_events import VALUES_MAX
from cache.events.event import Event
from cache.events.new_items import NO_NEW_ITEMS, NewItem, NewItems, NextTry
from cache.events.user_features import features_with
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.model.feature_checks import check_features, stack_features
from cache.model.tower import AnyTower, Tower, run_apart
from cache.model.tower_spec import InputSpec, TowerSpec

ITEM_TOWER: Final = "item_tower"
ITEM_VECTORS: Final = "item_vectors"
"""Fact of a manifest: its items are a table of vectors beside the bundle, which takes a row for each new item."""

OUTPUT_MAX: Final = 65_504.0
"""Largest number of an item's vector that an event brought or made: scores far beyond all others would leave no list
any precision."""

RETRIES_S: Final = (1.0, 8.0, 60.0)
"""Seconds until an input on which the tower raised is tried again: memory and time-outs pass, what it cannot take never
does. After the last of these it is refused."""

_AT_ONCE: Final = 256
_LOOKED_AT: Final = 64
"""Own items whose vectors tell if there is a bound: to read those of all would take long."""
_FIXED: Final = (
    "the item tower of the live generation takes an item's index, so its items are those of the bundle: train or "
    "import the bundle anew with the item, or let a tower compute its vector from features"
)


class UnfitNewItem(InvalidInput):
    """A new item that the models of a generation cannot answer with."""

    code = "unfit_item"


class FixedItems(UnfitNewItem):
    """A new item where the models know those alone that they were made of."""

    code = "fixed_items"


@dataclass(frozen=True, slots=True)
class NewItemInputs:
    """Input that makes an item answerable: `features` of the item tower, a vector of `dims` numbers, or neither.

    `vector_abs_max` is the largest number that its vector may have.
    """

    features: tuple[InputSpec, ...] = ()
    dims: int = 0
    vector_abs_max: float = OUTPUT_MAX

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Input by a manifest's item tower."""
        if manifest.facts.get(ITEM_VECTORS):
            return cls(dims=manifest.items.dims)
        model = manifest.models.get(ITEM_TOWER)
        spec = None if model is None else TowerSpec.from_json(model.spec)
        if spec is None or len(spec.features) < len(spec.inputs):
            return cls()
        return cls(spec.features)

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
            raise FixedItems(_FIXED, field="vector" if event.features is None else "features")

    def _check_features(self, event: Event) -> None:
        columns = sorted(str(input_spec.column) for input_spec in self.features)
        requirement = f"the item tower of the live generation takes {', '.join(columns)}"
        if event.vector is not None:
            raise UnfitNewItem(
                f"{requirement} and makes the vector itself: send these as features, and no vector",
                field="vector",
            )
        features = event.features or {}
        if missing := [column for column in columns if column not in features]:
            raise UnfitNewItem(
                f"{requirement}: {', '.join(missing)} is missing; send all of them with a new item, and what changes "
                "of one "
                "that is known as attributes",
                field="features",
            )
        try:
            check_features(self.features, {column: features[column] for column in columns})
        except InvalidInput as error:
            field = f"features.{error.details.get('field')}"
            raise UnfitNewItem(f"{requirement}: {error.message}", field=field) from error


@dataclass(frozen=True, slots=True, eq=False)
class NewItemTower:
    """Tower that makes vectors of new items as the night makes those of all, or none where these come with theirs."""

    inputs: NewItemInputs
    tower: AnyTower | None = None

    @classmethod
    def open(
        cls, manifest: Manifest, root: Path, items: ItemTable, *, threads: int, cores: Sequence[int]
    ) -> Self:
        """Opens the item tower in fp32 where items are made of features; `items` are the generation's own.

        Where theirs go beyond OUTPUT_MAX a tower's vectors are not bounded, and others by theirs, as by the night.
        """
        inputs = NewItemInputs.of(manifest)
        largest = float(np.abs(items.vectors[:_LOOKED_AT]).max(initial=0))
        if largest > OUTPUT_MAX:
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
        sends events: an item that the tower raises on costs the others nothing, and is tried again after RETRIES_S.
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
        for start in range(0, len(fresh), _AT_ONCE):
            chunk = fresh[start : start + _AT_ONCE]
            for (input_key, _), vector, has_raised in zip(
                chunk, *self._vectors([row for _, row in chunk]), strict=True
            ):
                last = failed.pop(input_key, NextTry(0, now_s))
                if not has_raised:
                    vector_by_input[input_key] = vector
                elif last.tries < len(RETRIES_S):
                    failed[input_key] = NextTry(last.tries + 1, now_s + RETRIES_S[last.tries])
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
        usable = [
            keyed_input
            for keyed_input in usable
            if keyed_input[1] not in refused and keyed_input[1] not in failed
        ]
        if not usable:
            return NewItems(table.count, refused=refused, failed=failed)
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
        )

    def _fits(self, vector: NDArray[np.float32]) -> bool:
        return bool(
            np.isfinite(vector).all()
            and np.abs(vector).max(initial=0) <= self.inputs.vector_abs_max
        )

    def _input(self, item: NewItem, values: Mapping[str, Any]) -> tuple[bytes, Any]:
        """(what names the input, the input itself), the first empty where the models cannot take it."""
        if self.inputs.features:
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
        return run_apart(self.tower, {
            input_spec.name: stack_features(input_spec, [row[input_spec.name] for row in checked])
            for input_spec in self.inputs.features
        })  # fmt: skip
