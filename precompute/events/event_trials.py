"""Trial of values that events set: each is run through the models before a night uses it; unusable ones are left out.

Any caller can send events. A number beyond a tower's table would end the night, and one that overflows it refuse it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.events.new_items import NEW_VECTOR_ABS_MAX, with_item_id
from cache.format.manifest import EntityKind
from cache.model.tower import Histories, Tower, run_isolating_failures
from cache.process.host import usable_cores
from cache.records import Layout, unfit_rows
from precompute.builds.tables import layout_of, producer_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import NightConfig
from precompute.events.files import EventValues, brought_vectors, counted_behind
from precompute.partitions.catalogue import feature_inputs
from precompute.partitions.night_input import NightValues
from precompute.scoring.towers import bind_inputs
from precompute.sources.columns import (Ids, UnusableMaskByReason, as_numpy_mask)
from precompute.sources.erasures import ErasedEntities
from precompute.sources.features import (EntityValues, digest_of_event_values, read_feature_values, with_event_values)
from precompute.sources.files import SourceFile, feature_file, source_file
from precompute.sources.readers import (NO_COLUMNS_OF_LISTS, read_features)
from precompute.sources.unusable import (EVENTS_SOURCE_PREFIX, NOT_FINITE_REASON, RowCase, UnusableRows)

AT_ONCE: Final = 4_096
"""Users, or items, tried together."""
RAISES: Final = "the model cannot be run on it"
BEYOND: Final = f"an output beyond {NEW_VECTOR_ABS_MAX:,.0f}"
UNFIT: Final = "an output that does not fit its table's precision"
VECTORS: Final = f"{EVENTS_SOURCE_PREFIX}.item_vectors"
"""Name in reports of the vectors that events brought."""
WIDTH: Final = "a vector of more or fewer numbers than the table's"
BEYOND_TABLE: Final = f"a number beyond {NEW_VECTOR_ABS_MAX:,.0f} and all of the table's"
_TABLE_ROWS: Final = 64


def values_of_night(
    config: NightConfig,
    bundle: Bundle,
    erased: ErasedEntities,
    unusable: UnusableRows,
    cut_s: int,
    *,
    files: Sequence[SourceFile],
) -> NightValues:
    """Return the values in files of events; drop those of erased entities, and note and drop unusable ones.

    For an entity with a dropped value the table's counts; so it does once a value was set `keep_values_days` before the
    cut (Unix seconds).
    """
    inputs: dict[EntityKind, set[str]] = {
        kind: {str(input_spec.column) for input_spec in feature_inputs(bundle, kind)} for kind in ("user", "item")
    }  # fmt: skip
    behind = counted_behind(config.events.keep_values_days, cut_s)
    event_values = EventValues.read(
        files, {"user": erased.users, "item": erased.items},
        {**inputs, "item": inputs["item"] | {*config.sources.item_attributes}}, behind,
    )  # fmt: skip
    if config.sources.item_vectors:
        vectors = brought_vectors(files, behind)
        _note_left_out(
            bundle, {raw: vectors[raw] for raw in vectors.keys() - erased.items}, unusable
        )
    users = _usable(config, bundle, "user", event_values.users, unusable)
    named_items = _with_ids(config, bundle, event_values)
    items = _usable(config, bundle, "item", named_items, unusable)
    return NightValues(
        users, items, event_values.items, event_values.event_item_ids, _unlisted(config, event_values.event_item_ids),
        digest_of_event_values(users, inputs["user"]),
    )  # fmt: skip


def _with_ids(config: NightConfig, bundle: Bundle, event_values: EventValues) -> EntityValues:
    """Return the values of items; where a model takes the id as a feature, it is that of the event's item."""
    inputs, id_column = feature_inputs(bundle, "item"), config.sources.item_column
    if id_column not in {input_spec.column for input_spec in inputs}:
        return event_values.items
    values_by_id: dict[bytes, Mapping[str, Any]] = {
        raw: {name: value for name, value in values.items() if name != id_column}
        for raw, values in event_values.items.items()
    }
    for raw in event_values.event_item_ids:
        values_by_id[raw] = with_item_id(values_by_id.get(raw, {}), raw.decode(), inputs, id_column)
    return {raw: values for raw, values in values_by_id.items() if values}


def _unlisted(config: NightConfig, event_item_ids: Collection[bytes]) -> frozenset[bytes]:
    """Return the ids without a row in the table that lists the items."""
    sources = config.sources
    if not event_item_ids or (table := sources.item_vectors or sources.item_features) is None:
        return frozenset()
    raws = sorted(event_item_ids)
    named = pa.array([raw.decode() for raw in raws], pa.string())
    is_listed = np.zeros(len(raws), np.bool_)
    for ids, _ in read_features(source_file(table, config.path(".")), sources.item_column, ()):
        is_listed |= as_numpy_mask(pc.is_in(named, value_set=ids.names))
    return frozenset(raws[row] for row in np.flatnonzero(~is_listed).tolist())


def _note_left_out(
    bundle: Bundle, vectors: Mapping[bytes, Sequence[float]], unusable: UnusableRows
) -> None:
    """Note vectors of new items that the bundle was made without, because they do not fit its table's."""
    raws = sorted(vectors)
    if not raws:
        return
    is_out = (
        bundle.vocabulary.find_positions(pa.array([raw.decode() for raw in raws], pa.string())) < 0
    )
    is_wide = np.array([len(vectors[raw]) != bundle.dims for raw in raws])
    unusable.count_checked(VECTORS, len(raws))
    bad_mask_by_reason: UnusableMaskByReason = {WIDTH: is_out & is_wide, BEYOND_TABLE: is_out}
    unusable.note_rows(VECTORS, bad_mask_by_reason, lambda row: {"item": raws[row].decode()})


def _usable(
    config: NightConfig,
    bundle: Bundle,
    kind: EntityKind,
    values: EntityValues,
    unusable: UnusableRows,
) -> EntityValues:
    for model in bundle.models:
        if not values or model.entity != kind or not model.spec.features:
            continue
        trial = _Trial.of(config, bundle, model)
        values_by_id: dict[bytes, Mapping[str, Any]] = dict(values)
        concerned = trial.concerned(values)
        for start in range(0, len(concerned), AT_ONCE):
            batch_values_by_id = {raw: values[raw] for raw in concerned[start : start + AT_ONCE]}
            unusable.count_checked(trial.source, len(batch_values_by_id))
            for raw in trial.left_out(batch_values_by_id, unusable):
                values_by_id[raw] = {
                    name: value for name, value in values[raw].items() if name not in trial.columns
                }
        values = {
            raw: value_by_attribute
            for raw, value_by_attribute in values_by_id.items()
            if value_by_attribute
        }
    return values


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """Trial of one model: the values that events set for each entity, completed by another entity's table values.

    `row` is that other entity, which the model can answer; None if the table has none. `output_abs_max` is the
    largest number that an output may have.
    """

    model: BundleModel
    tower: Tower
    layouts: list[Layout]
    columns: tuple[str, ...]
    row: Mapping[str, Any] | None
    output_abs_max: float

    @classmethod
    def of(cls, config: NightConfig, bundle: Bundle, model: BundleModel) -> Self:
        columns = tuple(sorted({str(feature.column) for feature in model.spec.features}))
        tower = Tower.open(model.path, model.spec, threads=config.threads or usable_cores())
        tables = scored_tables(config, bundle, model.entity).values()
        layouts = [
            layout
            for table_config in tables
            if producer_of(bundle, table_config).model == model.name
            and (layout := layout_of(bundle, table_config)).kind != "topk"
            # Lists are made of a user's vector, fit for its table or not, as answers during the day are.
            and table_config.kind != "user_vector"
        ]
        blank = cls(model, tower, layouts, columns, None, np.inf)
        for table in _pieces(config, bundle, model, columns):
            rows, outputs, raised = blank.outputs(table)
            good = np.flatnonzero(~raised & np.isfinite(outputs).all(axis=1))
            if len(good):
                row = {
                    name: column.take(pa.array(rows[good[:1]])) for name, column in table.items()
                }
                is_bounded = (
                    model is bundle.item_tower and _largest(outputs[good]) <= NEW_VECTOR_ABS_MAX
                )
                return replace(
                    blank, row=row, output_abs_max=NEW_VECTOR_ABS_MAX if is_bounded else np.inf
                )
        return blank

    @property
    def source(self) -> str:
        """Name of the trial in reports."""
        return f"{EVENTS_SOURCE_PREFIX}.{self.model.name}"

    def concerned(self, values: EntityValues) -> list[bytes]:
        """Return the sorted ids for which events set an input of the model; none if nothing can be tried."""
        if self.row is None:
            return []
        return sorted(
            raw
            for raw, value_by_attribute in values.items()
            if not value_by_attribute.keys().isdisjoint(self.columns)
        )

    def outputs(
        self, table: Mapping[str, Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Return (rows of a table with every input, outputs for these, mask of those on which the model raises)."""
        spec = self.model.spec
        read = {
            feature.name: read_feature_values(table[str(feature.column)], feature)
            for feature in spec.features
        }
        rows = np.flatnonzero(
            np.logical_and.reduce([feature_values.usable for feature_values in read.values()])
        )
        first = np.zeros(len(rows), np.int64)
        inputs = bind_inputs(
            spec, histories=Histories(np.arange(len(rows) + 1), first), item_indices=first,
            features={name: feature_values.numbers[rows] for name, feature_values in read.items()},
        )  # fmt: skip
        return rows, *run_isolating_failures(self.tower, inputs)

    def left_out(self, values: EntityValues, unusable: UnusableRows) -> Iterator[bytes]:
        """Yield the ids with a value that the model cannot use, and note them."""
        raws = sorted(values)
        ids = Ids.of(pa.array([raw.decode() for raw in raws], pa.string()))
        zero_rows = pa.array(np.zeros(len(raws), np.int64))
        repeated_columns = {
            name: column.take(zero_rows) for name, column in (self.row or {}).items()
        }
        # What is of another kind is noted where the columns are made.
        ((_, table),) = with_event_values(
            [(ids, repeated_columns)], values, kind=self.model.entity, unusable=UnusableRows(),
            inputs=self.model.spec.features,
        )  # fmt: skip
        rows, outputs, raised = self.outputs(table)
        if not len(rows):
            return
        finite = np.asarray(np.isfinite(outputs).all(axis=1))
        finite_outputs = np.where(finite[:, None], outputs, 0)
        bad_mask_by_reason: UnusableMaskByReason = {RAISES: raised, NOT_FINITE_REASON: ~finite}
        bad_mask_by_reason[BEYOND] = np.asarray(
            np.abs(finite_outputs).max(axis=1) > self.output_abs_max
        )
        for layout in self.layouts:
            bad_mask_by_reason[UNFIT] = bad_mask_by_reason.get(UNFIT, raised) | unfit_rows(
                layout, outputs
            )

        def named(row: int) -> RowCase:
            return {self.model.entity: raws[rows[row]].decode()}

        for row in np.flatnonzero(
            unusable.note_rows(self.source, bad_mask_by_reason, named)
        ).tolist():
            yield raws[rows[row]]


def _pieces(
    config: NightConfig, bundle: Bundle, model: BundleModel, columns: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield columns of a few rows of the model's table at a time."""
    sources = config.sources
    path = feature_file(config, model.entity, columns[0])
    id_column = sources.user_column if model.entity == "user" else sources.item_column
    lists = bundle.columns_of_lists if model.entity == "user" else NO_COLUMNS_OF_LISTS
    for ids, column_by_name in read_features(path, id_column, columns, columns_of_lists=lists):
        for start in range(0, len(ids), _TABLE_ROWS):
            yield {
                name: column.slice(start, _TABLE_ROWS) for name, column in column_by_name.items()
            }


def _largest(outputs: NDArray[np.float32]) -> float:
    return float(np.abs(outputs).max(initial=0))
