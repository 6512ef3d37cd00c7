"""Trial of values that events set: the models run on them before a night uses them; unusable values are left out.

Any caller can send events. Without the trial, an index beyond a tower's table would stop the night, and an output that
is not finite would make the gates refuse it.
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
from cache.records import Layout, unfit_row_mask
from precompute.builds.tables import layout_of, producer_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import NightConfig
from precompute.events.files import EventValues, counted_behind_number, newest_vector_by_item
from precompute.partitions.catalogue import feature_inputs
from precompute.partitions.night_input import NightValues
from precompute.scoring.towers import bind_inputs
from precompute.sources.columns import Ids, UnusableMaskByReason, as_numpy_mask
from precompute.sources.erasures import ErasedEntities
from precompute.sources.features import EntityValues, digest_of_event_values, read_feature_values, with_event_values
from precompute.sources.files import SourceFile, feature_file, source_file
from precompute.sources.readers import NO_COLUMNS_OF_LISTS, read_features
from precompute.sources.unusable import EVENTS_SOURCE_PREFIX, NOT_FINITE_REASON, RowCase, UnusableRows

ENTITIES_AT_ONCE: Final = 4_096
"""Number of users, or of items, in one run of a model."""
MODEL_RAISES_REASON: Final = "the model cannot be run on it"
OUTPUT_TOO_LARGE_REASON: Final = f"an output beyond {NEW_VECTOR_ABS_MAX:,.0f}"
UNFIT_OUTPUT_REASON: Final = "an output that does not fit its table's precision"
VECTORS_SOURCE_NAME: Final = f"{EVENTS_SOURCE_PREFIX}.item_vectors"
"""Name in reports of the vectors that events brought."""
WRONG_WIDTH_REASON: Final = "a vector of more or fewer numbers than the table's"
BEYOND_TABLE_REASON: Final = f"a number beyond {NEW_VECTOR_ABS_MAX:,.0f} and all of the table's"
_TABLE_ROWS_PER_PIECE: Final = 64


def read_event_values(
    config: NightConfig,
    bundle: Bundle,
    erased: ErasedEntities,
    unusable: UnusableRows,
    cut_s: int,
    *,
    event_files: Sequence[SourceFile],
) -> NightValues:
    """Return the values in files of events; drop those of erased entities, and note and drop unusable ones.

    For an entity whose value was dropped, the table's value is used. So it is if the event's value was set more than
    `keep_values_days` before the cut (Unix seconds).
    """
    input_columns_by_kind: dict[EntityKind, set[str]] = {
        entity_kind: {str(input_spec.column) for input_spec in feature_inputs(bundle, entity_kind)}
        for entity_kind in ("user", "item")
    }
    oldest_counted_number = counted_behind_number(config.events.keep_values_days, cut_s)
    event_values = EventValues.read(
        event_files,
        {"user": erased.users, "item": erased.items},
        {**input_columns_by_kind, "item": input_columns_by_kind["item"] | {*config.sources.item_attributes}},
        oldest_counted_number,
    )
    if config.sources.item_vectors:
        vector_by_item = newest_vector_by_item(event_files, oldest_counted_number)
        _note_left_out_vectors(
            bundle, {item_id: vector_by_item[item_id] for item_id in vector_by_item.keys() - erased.items}, unusable
        )
    usable_user_values = _usable_values(config, bundle, "user", event_values.users, unusable)
    item_values_with_ids = _with_item_id_features(config, bundle, event_values)
    usable_item_values = _usable_values(config, bundle, "item", item_values_with_ids, unusable)
    return NightValues(
        usable_user_values, usable_item_values, event_values.items, event_values.event_item_ids,
        _unlisted_ids(config, event_values.event_item_ids),
        digest_of_event_values(usable_user_values, input_columns_by_kind["user"]),
    )  # fmt: skip


def _with_item_id_features(config: NightConfig, bundle: Bundle, event_values: EventValues) -> EntityValues:
    """Return the values of items; if a model takes the id as a feature, it is the id of the event's item."""
    input_specs, id_column = feature_inputs(bundle, "item"), config.sources.item_column
    if id_column not in {input_spec.column for input_spec in input_specs}:
        return event_values.items
    values_by_id: dict[bytes, Mapping[str, Any]] = {
        item_id: {
            attribute_name: attribute_value
            for attribute_name, attribute_value in value_by_attribute.items()
            if attribute_name != id_column
        }
        for item_id, value_by_attribute in event_values.items.items()
    }
    for item_id in event_values.event_item_ids:
        values_by_id[item_id] = with_item_id(values_by_id.get(item_id, {}), item_id.decode(), input_specs, id_column)
    return {item_id: value_by_attribute for item_id, value_by_attribute in values_by_id.items() if value_by_attribute}


def _unlisted_ids(config: NightConfig, event_item_ids: Collection[bytes]) -> frozenset[bytes]:
    """Return the ids without a row in the table of items."""
    sources = config.sources
    if not event_item_ids or (table_name := sources.item_vectors or sources.item_features) is None:
        return frozenset()
    item_ids = sorted(event_item_ids)
    item_id_array = pa.array([raw.decode() for raw in item_ids], pa.string())
    listed_mask = np.zeros(len(item_ids), np.bool_)
    for ids, _ in read_features(source_file(table_name, config.path(".")), sources.item_column, ()):
        listed_mask |= as_numpy_mask(pc.is_in(item_id_array, value_set=ids.distinct_ids))
    return frozenset(item_ids[row] for row in np.flatnonzero(~listed_mask).tolist())


def _note_left_out_vectors(
    bundle: Bundle, vector_by_item: Mapping[bytes, Sequence[float]], unusable: UnusableRows
) -> None:
    """Note vectors of new items that were left out of the bundle because they do not fit the table's vectors."""
    item_ids = sorted(vector_by_item)
    if not item_ids:
        return
    missing_mask = bundle.vocabulary.find_positions(pa.array([raw.decode() for raw in item_ids], pa.string())) < 0
    wrong_width_mask = np.array([len(vector_by_item[raw]) != bundle.dims for raw in item_ids])
    unusable.count_checked(VECTORS_SOURCE_NAME, len(item_ids))
    bad_mask_by_reason: UnusableMaskByReason = {
        WRONG_WIDTH_REASON: missing_mask & wrong_width_mask,
        BEYOND_TABLE_REASON: missing_mask,
    }
    unusable.note_rows(VECTORS_SOURCE_NAME, bad_mask_by_reason, lambda row: {"item": item_ids[row].decode()})


def _usable_values(
    config: NightConfig,
    bundle: Bundle,
    entity_kind: EntityKind,
    attribute_values_by_entity: EntityValues,
    unusable: UnusableRows,
) -> EntityValues:
    for model in bundle.models:
        if not attribute_values_by_entity or model.entity != entity_kind or not model.spec.features:
            continue
        trial = _ModelTrial.of(config, bundle, model)
        values_by_id: dict[bytes, Mapping[str, Any]] = dict(attribute_values_by_entity)
        concerned_ids = trial.concerned_ids(attribute_values_by_entity)
        for batch_start in range(0, len(concerned_ids), ENTITIES_AT_ONCE):
            batch_values_by_id = {
                entity_id: attribute_values_by_entity[entity_id]
                for entity_id in concerned_ids[batch_start : batch_start + ENTITIES_AT_ONCE]
            }
            unusable.count_checked(trial.source_name, len(batch_values_by_id))
            for entity_id in trial.left_out_ids(batch_values_by_id, unusable):
                values_by_id[entity_id] = {
                    attribute_name: attribute_value
                    for attribute_name, attribute_value in attribute_values_by_entity[entity_id].items()
                    if attribute_name not in trial.input_columns
                }
        attribute_values_by_entity = {
            entity_id: value_by_attribute
            for entity_id, value_by_attribute in values_by_id.items()
            if value_by_attribute
        }
    return attribute_values_by_entity


@dataclass(frozen=True, slots=True, eq=False)
class _ModelTrial:
    """Trial of one model on the values that events set; missing inputs are filled with the values of `filler_row`.

    `filler_row` is an entity for which the model gives a finite output; None if the table has none. `output_abs_max` is
    the limit of the absolute value of outputs.
    """

    model: BundleModel
    tower: Tower
    output_layouts: list[Layout]
    input_columns: tuple[str, ...]
    filler_row: Mapping[str, Any] | None
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
            # A user's vector may exceed its table's precision: lists are made from the vector itself, as are daytime
            # answers.
            and table_config.kind != "user_vector"
        ]
        trial_without_row = cls(model, tower, layouts, columns, None, np.inf)
        for table_columns in _table_pieces(config, bundle, model, columns):
            table_rows, outputs, raised_mask = trial_without_row.outputs(table_columns)
            good_indexes = np.flatnonzero(~raised_mask & np.isfinite(outputs).all(axis=1))
            if len(good_indexes):
                example_row = {
                    name: column.take(pa.array(table_rows[good_indexes[:1]])) for name, column in table_columns.items()
                }
                is_bounded = model is bundle.item_tower and _largest_abs(outputs[good_indexes]) <= NEW_VECTOR_ABS_MAX
                return replace(
                    trial_without_row,
                    filler_row=example_row,
                    output_abs_max=NEW_VECTOR_ABS_MAX if is_bounded else np.inf,
                )
        return trial_without_row

    @property
    def source_name(self) -> str:
        """Name of the trial in reports."""
        return f"{EVENTS_SOURCE_PREFIX}.{self.model.name}"

    def concerned_ids(self, values_by_entity: EntityValues) -> list[bytes]:
        """Return the sorted ids for which events set an input of the model; none if there is no `filler_row`."""
        if self.filler_row is None:
            return []
        return sorted(
            entity_id
            for entity_id, value_by_attribute in values_by_entity.items()
            if not value_by_attribute.keys().isdisjoint(self.input_columns)
        )

    def outputs(
        self, table_columns: Mapping[str, Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Return (rows of a table with all inputs, their outputs, mask of the rows on which the model raises)."""
        spec = self.model.spec
        values_by_feature = {
            feature.name: read_feature_values(table_columns[str(feature.column)], feature) for feature in spec.features
        }
        complete_rows = np.flatnonzero(
            np.logical_and.reduce([feature_values.usable_mask for feature_values in values_by_feature.values()])
        )
        zero_index = np.zeros(len(complete_rows), np.int64)
        inputs = bind_inputs(
            spec,
            histories=Histories(np.arange(len(complete_rows) + 1), zero_index),
            item_indices=zero_index,
            features={
                name: feature_values.input_numbers[complete_rows] for name, feature_values in values_by_feature.items()
            },
        )
        return complete_rows, *run_isolating_failures(self.tower, inputs)

    def left_out_ids(self, values_by_entity: EntityValues, unusable: UnusableRows) -> Iterator[bytes]:
        """Yield the ids with a value that the model cannot use, and note them."""
        entity_ids = sorted(values_by_entity)
        id_column = Ids.of(pa.array([raw.decode() for raw in entity_ids], pa.string()))
        zero_rows = pa.array(np.zeros(len(entity_ids), np.int64))
        repeated_columns = {name: column.take(zero_rows) for name, column in (self.filler_row or {}).items()}
        # Values of a wrong type are noted elsewhere, when the columns are made.
        ((_, table_columns),) = with_event_values(
            [(id_column, repeated_columns)], values_by_entity, entity_kind=self.model.entity, unusable=UnusableRows(),
            input_specs=self.model.spec.features,
        )  # fmt: skip
        complete_rows, outputs, raised_mask = self.outputs(table_columns)
        if not len(complete_rows):
            return
        finite_mask = np.asarray(np.isfinite(outputs).all(axis=1))
        finite_outputs = np.where(finite_mask[:, None], outputs, 0)
        bad_mask_by_reason: UnusableMaskByReason = {MODEL_RAISES_REASON: raised_mask, NOT_FINITE_REASON: ~finite_mask}
        bad_mask_by_reason[OUTPUT_TOO_LARGE_REASON] = np.asarray(
            np.abs(finite_outputs).max(axis=1) > self.output_abs_max
        )
        for layout in self.output_layouts:
            bad_mask_by_reason[UNFIT_OUTPUT_REASON] = bad_mask_by_reason.get(
                UNFIT_OUTPUT_REASON, raised_mask
            ) | unfit_row_mask(layout, outputs)

        def unusable_case(row_index: int) -> RowCase:
            return {self.model.entity: entity_ids[complete_rows[row_index]].decode()}

        for row in np.flatnonzero(unusable.note_rows(self.source_name, bad_mask_by_reason, unusable_case)).tolist():
            yield entity_ids[complete_rows[row]]


def _table_pieces(
    config: NightConfig, bundle: Bundle, model: BundleModel, table_columns: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield columns of a few rows of the model's table at a time."""
    sources = config.sources
    table_file = feature_file(config, model.entity, table_columns[0])
    id_column = sources.user_column if model.entity == "user" else sources.item_column
    list_columns = bundle.columns_of_lists if model.entity == "user" else NO_COLUMNS_OF_LISTS
    for row_ids, column_by_name in read_features(table_file, id_column, table_columns, columns_of_lists=list_columns):
        for row_start in range(0, len(row_ids), _TABLE_ROWS_PER_PIECE):
            yield {name: column.slice(row_start, _TABLE_ROWS_PER_PIECE) for name, column in column_by_name.items()}


def _largest_abs(model_outputs: NDArray[np.float32]) -> float:
    return float(np.abs(model_outputs).max(initial=0))
