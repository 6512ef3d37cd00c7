"""Import of a classifier or regressor in ONNX: a folder whose night stores the model's output for each table row."""

import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.errors import LarderError, ModelFailed, SourceError
from cache.model.tower import Tower
from cache.model.tower_spec import InputDtype, InputSpec, TowerSpec
from cache.store.artefacts import write_atomically
from precompute.adapters.folder import (
    BUNDLE_FOLDER,
    SETTINGS_FILE,
    limits_of_user_features,
    open_import_folder,
    reinstate_bundle,
    sweep_import_leftovers,
)
from precompute.adapters.inputs import checked_ids, feature_table, name_row
from precompute.bundles.bundle import COLUMNS_OF_INPUTS_KEY, Bundle, BundleModel, ModelFile, write_bundle
from precompute.bundles.bundle_store import swap_in_folder
from precompute.bundles.imports import note_import_begun, read_import_report, write_import_report
from precompute.bundles.onnx_model import OnnxModel, item_tower, stated_classes
from precompute.config.settings import NightConfig, night_config
from precompute.scoring.towers import demand_feature_types, run_named
from precompute.sources.plausibility import JUDGED_ROWS_MIN

FEATURES_FILE = "user_features.parquet"
TOLERANCE = 1e-4
"""Largest allowed difference from `expected`, absolute plus relative: the model is float32, the library float64."""
COLUMN_SHARE_TOLERANCE = 1e-6
"""Further allowed difference, relative to the column's largest value: a float32 sum is rounded at the size of its
terms."""
ROUNDING_SHARE_MAX = 1e-5
"""Share of the column's largest value up to which a difference is taken for rounding, not for wrong inputs."""
ROWS_AT_ONCE = 8_192
LISTED_NAMES_MAX = 40
"""Number of columns that a message names."""
REORDER_CHECK_ROWS_MAX = 2_000
"""Number of rows on which the previous import's model is run as well, if the labels have another order."""
_ROWS_DIFFER_REMEDY = (
    "were expected and the model computed from the same rows, the same columns in the order of the training, and the "
    "same codes for categories?"
)
_ROUNDED_REMEDY = (
    "differences so small against the largest value are rounding errors of float32: train on a smaller scale "
    "(thousands, or a logarithm)"
)
_TEXTS_DIFFER_REMEDY = (
    "exported tokenizers and lower-casing treat letters beyond ASCII in their own way; make texts lower-case ASCII "
    "before training, before this import, and in each request, or take the numbers of the vectorizer as features"
)

_SETTINGS_TEMPLATE = """\
# Written by an import; later imports do not change it. All settings: `python -m cache.config.reference`.
bundle = "bundle"
artifacts = "artifacts"
state = "state"

[sources]
user_features = "{features}"     # one row for each scored user; each night reads the file again

[tables.{table}]
kind = "value"
value = "{table}"
precision = "f4"

[serving]
precision = "fp32"     # ids without a row get answers of the fp32 model, as at night, not of its int8 form
"""
_DTYPE_BY_ONNX_TYPE: dict[int, InputDtype] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.STRING: "string",
}


LONG_TEXT_PLACEHOLDER: Final = "a text"
"""Text that the report shows in place of a long text, which may be personal data."""

SHOWN_TEXT_CHARS_MAX: Final = 40
"""Maximum characters of a text that the report shows."""


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    """Findings about an imported classifier; `largest_difference` from `expected`, None if nothing was compared."""

    folder: str
    table: str
    rows: int
    incomplete_rows: int
    """Number of rows with a missing value; a night stores no answer for them."""
    labels: tuple[str, ...]
    request: dict[str, Any]
    """Features of the first usable row, as a request sends them; LONG_TEXT_PLACEHOLDER replaces a long text."""
    largest_difference: float | None
    is_again: bool
    seconds: float
    remark: str = ""
    """Reason why the bundle could not be handed over again; empty if it was, or if that was not needed."""
    limits: tuple[str, ...] = ()
    """Limits of a night of this table, such as rows that a night leaves out."""
    earlier_labels: tuple[str, ...] = ()
    """Labels of the previous import, if they differ."""
    classes: tuple[str, ...] = ()
    """Names of the classes in the model, in the order of the labels; empty if the model names none."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns of the table that each input of the model takes, in the input's order."""
    earlier_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns at the previous import, for each input whose columns or their order have changed."""
    remarks: tuple[str, ...] = ()
    """Remarks on kept settings that do not fit this import."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        replacement_note = f"the previous import is replaced, its {SETTINGS_FILE} kept"
        return [
            f"{self.table}: {self.rows:,} rows, labels {', '.join(self.labels)}",
            *([f"{self.folder}: {replacement_note}"] if self.is_again else []),
            *self._labels_in_words(),
            *self._columns_in_words(),
            *self._incomplete_in_words(),
            *self.remarks,
            *(f"cannot: {limit_text}" for limit_text in (self.remark, *self.limits) if limit_text),
            self._comparison_in_words(),
            "a request for an id without a row sends features like " + orjson.dumps(self.request).decode(),
            f"next: cd {self.folder}, then larder check, larder night and larder serve",
        ]

    def _comparison_in_words(self) -> str:
        if self.largest_difference is not None:
            return f"largest difference from the library's outputs: {self.largest_difference:.1e}"
        order_remarks = [
            f"; {input_name} takes {_names_in_words(column_names)}: did the training have them in this order?"
            for input_name, column_names in self.columns.items()
            if len(column_names) > 1
        ]
        return "".join(["not compared with the library: give its output for each row as `expected`", *order_remarks])

    def _labels_in_words(self) -> list[str]:
        remarks = []
        if self.classes and self.classes != self.labels:
            class_label_pairs = zip(self.classes, self.labels, strict=True)
            pairs_text = ", ".join(f"{class_name} is {label}" for class_name, label in class_label_pairs)
            remarks.append(f"classes of the model: {pairs_text}")
        if self.earlier_labels:
            earlier_text, current_text = ", ".join(self.earlier_labels), ", ".join(self.labels)
            remarks.append(
                f"labels were {earlier_text}, and are {current_text} from the next night on: inform those who use the "
                "values"
            )
        return remarks

    def _columns_in_words(self) -> list[str]:
        return [
            (
                f"columns of {input_name} were {_names_in_words(earlier_names)}, and are "
                f"{_names_in_words(self.columns[input_name])}: requests send their "
                "values in this order from the next night on"
            )
            for input_name, earlier_names in self.earlier_columns.items()
        ]

    def _incomplete_in_words(self) -> list[str]:
        if not self.incomplete_rows:
            return []
        remark = "rows lack a value and get no answer: fill in the value that stood for a missing one in the training"
        return [f"{self.incomplete_rows:,} {remark}"]


def from_classifier(
    model: Any,
    features: Any,
    *,
    to: str | Path,
    labels: Sequence[str],
    table: str = "prediction",
    id_column: str = "user",
    columns: Sequence[str] | None = None,
    output: str | None = None,
    expected: Any = None,
) -> ClassifierReport:
    """Make a folder from an ONNX model (a path, bytes or a ModelProto) and a table with a row for each id.

    `features` is an Arrow, pandas or polars table, or the path of a Parquet or CSV file. A model with one input takes
    all `columns` as one matrix, by default all but `id_column`; each of several inputs takes the column of its name.
    `output` names the output with a number for each label, by default the only float output, or the one whose name
    contains "prob". `expected` [rows, labels] is the library's output for each row. Raises SourceError or BundleError,
    naming the cause and the remedy, and writes nothing then.
    """
    started_at, to = time.perf_counter(), Path(to)
    source_table = feature_table(features, "features", id_column)
    if id_column not in source_table.column_names:
        raise SourceError(
            f"features has no column {id_column!r} of ids; it has {', '.join(source_table.column_names)}: give the "
            "name of the id column as id_column"
        )
    ids = checked_ids(source_table[id_column], "user")
    _demand_labels(labels)
    onnx_bytes = _onnx_bytes(model)
    onnx_graph = _parse_graph(onnx_bytes)
    columns_by_input = _columns_by_input(onnx_graph, source_table.drop_columns([id_column]), columns)
    spec, column_by_input = _bind_inputs(onnx_graph, source_table, columns_by_input, output, labels)
    classes = stated_classes(onnx_graph, len(labels))
    _demand_order_of_classes(labels, classes)
    is_new = not to.exists()
    earlier_report = read_import_report(to)
    earlier_labels = tuple(earlier_report.get("labels", labels))
    earlier_columns = {
        input_name: tuple(earlier_report.get("columns", {}).get(input_name, column_names))
        for input_name, column_names in columns_by_input.items()
    }
    if columns is None and expected is None:
        _demand_order_of_columns(columns_by_input, earlier_columns)
    open_import_folder(to)
    sweep_import_leftovers(to)
    _demand_same_value_table(to, table)
    staging_folder = to / f".{BUNDLE_FOLDER}.{secrets.token_hex(4)}.part"
    try:
        user_tower = ModelFile(OnnxModel(onnx_bytes), spec)
        labelled_model = ModelFile(OnnxModel(onnx_bytes), spec, labels=tuple(labels))
        # Labels are the items, with unit vectors: the score of a label is the model's number for it.
        item_model = ModelFile(
            item_tower(np.eye(len(labels), dtype=np.float32)),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", len(labels)),
            entity="item",
        )
        bundle = write_bundle(
            staging_folder,
            name=table,
            version="1",
            dims=len(labels),
            item_ids=list(labels),
            user_tower=user_tower,
            item_tower=item_model,
            values={table: labelled_model},
            training={"imported": "classifier", COLUMNS_OF_INPUTS_KEY: columns_by_input},
        )
        tower = Tower.open(bundle.value_models[table].path, spec)
        is_complete_row = np.stack([_complete_row_mask(column) for column in column_by_input.values()]).all(axis=0)
        usable_rows = np.flatnonzero(is_complete_row)
        if not len(usable_rows):
            raise _no_usable_row_error(source_table.drop_columns([id_column]), len(ids))
        tried_rows = _try_rows(tower, column_by_input, expected, ids, usable_rows)
        _demand_answer_to_blank(tower)
        if tuple(labels) not in (classes, earlier_labels):
            compared_rows = usable_rows[:REORDER_CHECK_ROWS_MAX]
            input_by_name = {
                spec_.name: _model_input(column_by_input[spec_.name], spec_, compared_rows) for spec_ in spec.inputs
            }
            _demand_earlier_label_order(to, bundle.value_models[table], tower, input_by_name)
        note_import_begun(to)
        swap_in_folder(staging_folder, to / BUNDLE_FOLDER)
    except BaseException:
        if is_new:
            shutil.rmtree(to, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    feature_rows = pa.table({"user": ids, **column_by_input})
    pq.write_table(feature_rows, to / f".{FEATURES_FILE}.part")
    (to / f".{FEATURES_FILE}.part").replace(to / FEATURES_FILE)
    is_again = (to / SETTINGS_FILE).exists()
    if not is_again:
        write_atomically(to / SETTINGS_FILE, _SETTINGS_TEMPLATE.format(features=FEATURES_FILE, table=table).encode())
    remark = reinstate_bundle(to) if is_again else ""
    request = {
        input_name: _shown_value(column[int(usable_rows[0])].as_py()) for input_name, column in column_by_input.items()
    }
    limits = limits_of_user_features(to, feature_rows, spec, tried_rows.nonfinite_row_count)
    if tried_rows.common_output is not None and len(usable_rows) >= JUDGED_ROWS_MIN:
        values = ", ".join(f"{value:g}" for value in tried_rows.common_output)
        limit = (
            f"distinguish rows: all {len(usable_rows):,} rows get the same answer ({values}), and the gate "
            "distinct_values refuses such a night: was the training finished, and are these its columns?"
        )
        limits += (limit,)
    report = ClassifierReport(
        folder=str(to),
        table=table,
        rows=len(ids),
        incomplete_rows=int((~is_complete_row).sum()),
        labels=tuple(labels),
        request=request,
        largest_difference=tried_rows.largest_difference,
        is_again=is_again,
        seconds=round(time.perf_counter() - started_at, 3),
        remark=remark,
        limits=limits,
        earlier_labels=() if earlier_labels == tuple(labels) else earlier_labels,
        classes=classes,
        columns=columns_by_input,
        earlier_columns={
            input_name: column_names
            for input_name, column_names in earlier_columns.items()
            if column_names != columns_by_input[input_name]
        },
        remarks=_kept_settings_in_words(to, table) if is_again else (),
    )
    source = str(model) if isinstance(model, str | Path) else ""
    write_import_report(to, report.to_json(), bundle.digest, source)
    return report


def _demand_same_value_table(import_folder: Path, value_name: str) -> None:
    """Raise SourceError if kept settings have a table of a value that this import does not make."""
    try:
        config = (
            night_config(str(import_folder / SETTINGS_FILE))
            if (import_folder / SETTINGS_FILE).exists()
            else NightConfig()
        )
    except LarderError:  # `larder check` reports these settings
        return
    if config.tables == NightConfig().tables:
        return
    for table_name, table_config in config.tables.items():
        if table_config.kind == "value" and table_config.value != value_name:
            raise SourceError(
                f"[tables.{table_name}] in {import_folder / SETTINGS_FILE} has the value {table_config.value!r}, but "
                f"this import only makes {value_name!r}: import with --table {table_config.value}, name another "
                "folder, or change the file"
            )


def _demand_labels(labels: Sequence[str]) -> None:
    """Raise SourceError for labels that are missing, empty or repeated."""
    if not labels:
        raise SourceError("labels are empty: give a name for each number of the model's output")
    for label_index, label in enumerate(labels):
        if not label:
            raise SourceError(f"label {label_index + 1} of {','.join(labels)} is empty: give it a name")
        if label in labels[:label_index]:
            raise SourceError(f"label {label!r} is given twice: give each number a different name")


def _demand_order_of_classes(labels: Sequence[str], class_names: tuple[str, ...]) -> None:
    """Raise SourceError for a label that is one of the model's classes, but at another position."""
    if any(
        label in class_names and class_names.index(label) != label_index for label_index, label in enumerate(labels)
    ):
        raise SourceError(
            f"labels are {', '.join(labels)}, but the model's classes are {', '.join(class_names)}, in this order: "
            "numbers would have wrong names; give the labels in the order of the classes"
        )


def _demand_order_of_columns(
    columns_by_input: Mapping[str, tuple[str, ...]], earlier_columns: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise SourceError if the table has an input's columns in another order than at the previous import."""
    for input_name, column_names in columns_by_input.items():
        earlier_names = earlier_columns[input_name]
        if earlier_names != column_names and sorted(earlier_names) == sorted(column_names):
            raise SourceError(
                f"columns of {input_name!r} are {_names_in_words(column_names)} in this table, and were "
                f"{_names_in_words(earlier_names)} at the previous import, but the model takes columns by position: "
                "name them as columns, in the order of the training, or give expected"
            )


def _shown_value(feature_value: object) -> object:
    """Return a feature's value for the report."""
    if isinstance(feature_value, list):
        return [_shown_value(element) for element in feature_value]
    return (
        LONG_TEXT_PLACEHOLDER
        if isinstance(feature_value, str) and len(feature_value) > SHOWN_TEXT_CHARS_MAX
        else feature_value
    )


def _names_in_words(names: Sequence[str]) -> str:
    """Return the first names of a list, with the number of all names if some are left out."""
    names_text = ", ".join(names[:LISTED_NAMES_MAX])
    return names_text if len(names) <= LISTED_NAMES_MAX else f"{names_text}, ... ({len(names)} in all)"


def _demand_earlier_label_order(
    import_folder: Path, model: BundleModel, tower: Tower, input_by_name: Mapping[str, NDArray[Any]]
) -> None:
    """Raise SourceError if the order of labels has changed, but not the order of a retrained model's outputs.

    Two trainings give similar outputs for the same row. If outputs are nearer to the earlier ones by position than by
    label, the labels were given in a wrong order. The same model may be imported again to correct its labels.
    """
    try:
        earlier_model = Bundle.read(import_folder / BUNDLE_FOLDER).value_models[model.name]
        is_reordered = earlier_model.labels != model.labels and set(earlier_model.labels) == set(model.labels)
        if not is_reordered or earlier_model.spec != model.spec or earlier_model.digest == model.digest:
            return
        outputs, earlier_outputs = (
            tower.run(input_by_name),
            Tower.open(earlier_model.path, earlier_model.spec).run(input_by_name),
        )
    except (LarderError, KeyError):  # without a comparison the order counts as right
        return
    reordered_outputs = earlier_outputs[:, [earlier_model.labels.index(label) for label in model.labels]]
    mean_error_by_place = float(np.abs(outputs - earlier_outputs).mean())
    mean_error_by_label = float(np.abs(outputs - reordered_outputs).mean())
    if mean_error_by_place < mean_error_by_label:
        raise SourceError(
            f"labels are {', '.join(model.labels)}, and were {', '.join(earlier_model.labels)} at the previous import, "
            f"but the order of the model's numbers has not changed: over {len(outputs):,} rows they differ from the "
            f"earlier ones by {mean_error_by_place:.2g} by position, and by {mean_error_by_label:.2g} by label; give "
            "the labels in the earlier order. If that order was wrong, first import "
            f"{BUNDLE_FOLDER}/{earlier_model.path.name} with the right order"
        )


def _kept_settings_in_words(import_folder: Path, value_name: str) -> tuple[str, ...]:
    """Return remarks on kept settings with which nights use other files, or make no table of the model."""
    try:
        config = night_config(str(import_folder / SETTINGS_FILE))
    except LarderError:  # `larder check` reports these settings
        return ()
    remarks, features_file = [], config.sources.user_features
    if config.path(config.bundle).resolve() != (import_folder / BUNDLE_FOLDER).resolve():
        remarks.append(
            f"nights use the bundle {config.bundle} ({SETTINGS_FILE}), not the bundle of this import: set it to "
            f"{BUNDLE_FOLDER}"
        )
    if all(table_config.value != value_name for table_config in config.tables.values()):
        remarks.append(
            f"nights make no table of {value_name}: {SETTINGS_FILE} has no [tables.{value_name}] with kind and value "
            f'(kind = "value", value = "{value_name}")'
        )
    if features_file is None or config.path(features_file).resolve() != (import_folder / FEATURES_FILE).resolve():
        remark = (
            f"nights read {features_file or 'no features'} ([sources] user_features in {SETTINGS_FILE}), not the rows "
            f"of this import, which are in {FEATURES_FILE}"
        )
        try:
            demand_feature_types(config, Bundle.read(import_folder / BUNDLE_FOLDER))
        except LarderError as error:
            remark += f"; that table does not fit the model: {error.message}"
        remarks.append(remark)
    return tuple(remarks)


def _no_usable_row_error(feature_table: Any, row_count: int) -> SourceError:
    """Return the error for a table without a complete row; it names the columns without any value."""
    empty_column_names = [
        repr(name)
        for name in feature_table.column_names
        if not _complete_row_mask(feature_table[name].combine_chunks()).any()
    ]
    reason = (
        f"{', '.join(empty_column_names)} has no value in any row"
        if empty_column_names
        else "each row lacks a value in a column"
    )
    return SourceError(
        f"none of {row_count:,} rows of features can be used: {reason}: fill in the value that stood for a missing one "
        "in the training"
    )


def _onnx_bytes(model: Any) -> bytes:
    if isinstance(model, str | Path):
        try:
            return Path(model).read_bytes()
        except OSError as error:
            raise SourceError(f"model {model}: {error}; name the ONNX file") from None
    if isinstance(model, bytes):
        return model
    if hasattr(model, "SerializeToString"):
        return bytes(model.SerializeToString())
    raise SourceError(
        f"model is a {type(model).__name__}: export it to ONNX first (onnxmltools for XGBoost and LightGBM, skl2onnx "
        "for scikit-learn), and give the path or the result of the export"
    )


def _parse_graph(onnx_bytes: bytes) -> onnx.GraphProto:
    try:
        return onnx.load_from_string(onnx_bytes).graph
    except Exception as error:  # Protocol Buffers' errors share no base class
        raise SourceError(f"model is not an ONNX model: {error}") from None


def _graph_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    constant_names = {tensor.name for tensor in graph.initializer}
    return [graph_input for graph_input in graph.input if graph_input.name not in constant_names]


def _columns_by_input(
    graph: onnx.GraphProto, feature_table: Any, columns: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the columns that each input of the model takes; raise SourceError if the table lacks one of them."""
    input_names = [graph_input.name for graph_input in _graph_inputs(graph)]
    all_columns: tuple[str, ...] = tuple(feature_table.column_names if columns is None else columns)
    columns_by_input = {name: (name,) if len(input_names) > 1 else all_columns for name in input_names}
    for column in (column for names in columns_by_input.values() for column in names):
        if column not in feature_table.column_names:
            raise SourceError(
                f"features has no column {column!r}, which the model takes; it has "
                f"{', '.join(feature_table.column_names)}"
            )
    return columns_by_input


def _bind_inputs(
    graph: onnx.GraphProto,
    feature_table: Any,
    columns_by_input: Mapping[str, tuple[str, ...]],
    requested_output: str | None,
    labels: Sequence[str],
) -> tuple[TowerSpec, dict[str, Any]]:
    """Return the model's specification, and by input name an Arrow column with all rows of the input."""
    graph_inputs = _graph_inputs(graph)
    for graph_input in graph_inputs:
        if graph_input.type.tensor_type.elem_type not in _DTYPE_BY_ONNX_TYPE:
            raise SourceError(
                f"input {graph_input.name!r} of the model holds no float32, int32, int64 or text: export it with "
                "FloatTensorType, Int64TensorType or StringTensorType"
            )
    output_name = _output_name(graph, requested_output, len(labels))
    input_specs, column_by_input = [], {}
    for graph_input in graph_inputs:
        input_columns = columns_by_input[graph_input.name]
        input_spec = _input_spec(graph_input, input_columns)
        input_specs.append(input_spec)
        column_by_input[graph_input.name] = _input_column(feature_table.select(input_columns), input_spec)
    return TowerSpec(tuple(input_specs), output_name, len(labels)), column_by_input


def _output_name(graph: Any, requested_output: str | None, label_count: int) -> str:
    """Return the name of the output with a number for each label."""
    width_by_float_output = {
        graph_output.name: _matrix_width(graph_output)
        for graph_output in graph.output
        if graph_output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    output_names = (
        [requested_output]
        if requested_output
        else [name for name in width_by_float_output if len(width_by_float_output) == 1 or "prob" in name]
    )
    if any(graph_output.type.HasField("sequence_type") for graph_output in graph.output) and not width_by_float_output:
        raise SourceError(
            "the model gives a list of dictionaries: export it with zipmap off (skl2onnx: "
            "options={LogisticRegression: {'zipmap': False}}; onnxmltools: zipmap=False)"
        )
    if len(output_names) != 1 or output_names[0] not in width_by_float_output:
        raise SourceError(
            f"the model's float outputs are {', '.join(width_by_float_output) or 'none'}: give the name of the one "
            "with a number for each label as output"
        )
    width = width_by_float_output[output_names[0]]
    if width is not None and width != label_count:
        raise SourceError(
            f"output {output_names[0]!r} has {width} numbers, but there are {label_count} labels: give one label for "
            "each number, in the order of the model's classes"
        )
    return output_names[0]


def _matrix_width(value_info: Any) -> int | None:
    """Return the number of columns of a matrix [rows, columns]; None for a vector [rows], or if it is not stated."""
    dimensions = value_info.type.tensor_type.shape.dim
    return int(dimensions[1].dim_value) or None if len(dimensions) > 1 else None


def _input_spec(graph_input: Any, column_names: Sequence[str]) -> InputSpec:
    dtype = _DTYPE_BY_ONNX_TYPE[graph_input.type.tensor_type.elem_type]
    if (axis_count := len(graph_input.type.tensor_type.shape.dim)) > 2:
        raise SourceError(
            f"input {graph_input.name!r} of the model has {axis_count} axes, but features are rows and columns: export "
            "the model with an input [rows, columns]"
        )
    is_matrix = len(graph_input.type.tensor_type.shape.dim) > 1
    width = _matrix_width(graph_input)
    if not is_matrix and len(column_names) > 1:
        width = 1
    if width is not None and width != len(column_names):
        raise SourceError(
            f"input {graph_input.name!r} of the model takes {width} columns, but features has {len(column_names)} "
            f"({', '.join(column_names)}): name the model's columns as columns, in the order of the training"
        )
    return InputSpec(
        graph_input.name, "feature", dtype, column=graph_input.name, width=len(column_names) if is_matrix else None
    )


def _input_column(feature_table: Any, input_spec: InputSpec) -> Any:
    """Return the rows of an input as one Arrow column of values, or of lists of values; null if a value is missing."""
    arrow_type = {"float32": pa.float32(), "string": pa.string()}.get(input_spec.dtype, pa.int64())
    column_parts = []
    for column_name in feature_table.column_names:
        column = feature_table[column_name].combine_chunks()
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        try:
            column_parts.append(column.cast(arrow_type, safe=arrow_type != pa.float32()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SourceError(
                f"features: column {column_name!r} is {column.type}, and input {input_spec.name!r} of the model takes "
                f"{input_spec.dtype}: {error}; name the columns of the training as columns"
            ) from None
    if input_spec.width is None or (input_spec.dtype == "string" and input_spec.width == 1):
        return column_parts[0]
    width, row_count = len(column_parts), feature_table.num_rows
    interleaved_values = pa.concat_arrays(column_parts).take(
        pa.array(np.arange(width * row_count).reshape(width, row_count).T.ravel())
    )
    return pa.FixedSizeListArray.from_arrays(interleaved_values, width)


def _complete_row_mask(feature_column: Any) -> NDArray[np.bool_]:
    """Return a mask of the rows in which no value is missing, NaN or infinite."""
    values = feature_column.flatten() if pa.types.is_fixed_size_list(feature_column.type) else feature_column
    has_value: NDArray[np.bool_] = np.asarray(pc.is_valid(values))
    if pa.types.is_floating(values.type):
        has_value = has_value & np.asarray(pc.fill_null(pc.is_finite(values), False))
    return np.asarray(has_value.reshape(len(feature_column), -1).all(axis=1), np.bool_)


def _model_input(feature_column: Any, input_spec: InputSpec, row_indexes: NDArray[np.int64]) -> NDArray[Any]:
    """Return the rows of an input as the array that the model takes."""
    selected_column = feature_column.take(pa.array(row_indexes))
    if pa.types.is_fixed_size_list(selected_column.type):
        selected_column = selected_column.flatten()
    input_values = np.asarray(selected_column.to_pylist(), object if input_spec.dtype == "string" else input_spec.dtype)
    return input_values if input_spec.width is None else input_values.reshape(len(row_indexes), input_spec.width)


def _demand_answer_to_blank(tower: Tower) -> None:
    """Raise SourceError if the model fails on 0 and empty texts, which each replica tries before it serves a model."""
    blank_features = tower.spec.blank_features()
    blank_by_input = {
        input_spec.name: np.array(
            [blank_features[input_spec.name]], object if input_spec.dtype == "string" else input_spec.dtype
        )
        for input_spec in tower.spec.features
    }
    try:
        tower.run(blank_by_input)
    except ModelFailed as error:
        raise SourceError(
            f"the model answers each row of the table, but not 0 and empty texts, which each replica tries before it "
            f'serves: {error.message}; let the model take unknown values, for example with handle_unknown="ignore" '
            "for an encoder of scikit-learn",
            columns=[str(input_spec.column) for input_spec in tower.spec.features],
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class TriedRows:
    """Result of a run over all usable rows.

    `largest_difference` is the largest difference from `expected`, None if nothing was compared; `nonfinite_row_count`
    is the number of rows with an output that is not finite; `common_output` is the output of every row if all are
    equal.
    """

    largest_difference: float | None
    nonfinite_row_count: int
    common_output: NDArray[np.float32] | None


def _try_rows(
    tower: Tower,
    column_by_input: Mapping[str, Any],
    expected_values: Any,
    entity_ids: Any,
    usable_rows: NDArray[np.int64],
) -> TriedRows:
    """Run the model on all usable rows, of which there must be at least one.

    Raises SourceError if the model fails on a row, if no output is finite, if `expected_values` are not finite, or if
    outputs differ from them by more than the tolerance; the error names the first such id.
    """
    expected_outputs = _expected_outputs(expected_values, entity_ids, usable_rows, tower.spec.output_dims)
    outputs = np.empty((len(usable_rows), tower.spec.output_dims), np.float32)
    for batch_start in range(0, len(usable_rows), ROWS_AT_ONCE):
        batch_rows = usable_rows[batch_start : batch_start + ROWS_AT_ONCE]
        outputs[batch_start : batch_start + len(batch_rows)] = run_named(
            tower,
            {
                input_spec.name: _model_input(column_by_input[input_spec.name], input_spec, batch_rows)
                for input_spec in tower.spec.inputs
            },
            partial(name_row, "row of", entity_ids, batch_rows),
        )
    nonfinite_row_count = int((~np.isfinite(outputs).all(axis=1)).sum())
    if nonfinite_row_count == len(usable_rows):
        raise SourceError(
            f"the model's output is not finite for any of {len(usable_rows):,} rows: was the training finished, and "
            "are the columns in the order of the training?"
        )
    common_output = outputs[0] if (outputs == outputs[0]).all() else None
    if expected_outputs is None:
        return TriedRows(None, nonfinite_row_count, common_output)
    differences = np.abs(outputs - expected_outputs)
    largest_by_label = np.abs(expected_outputs).max(axis=0)
    tolerances = TOLERANCE + TOLERANCE * np.abs(expected_outputs) + COLUMN_SHARE_TOLERANCE * largest_by_label
    is_beyond_tolerance = ~(differences <= tolerances)  # true for NaN, too
    if (is_differing_row := is_beyond_tolerance.any(axis=1)).any():
        row = int(is_differing_row.argmax())
        label_index = int(is_beyond_tolerance[row].argmax())
        off_differences = differences[is_differing_row]
        finite_differences = off_differences[np.isfinite(off_differences)]
        largest_text = f"{finite_differences.max():.2g}" if len(finite_differences) else "not finite"
        remedy = _ROWS_DIFFER_REMEDY
        if (off_differences <= ROUNDING_SHARE_MAX * largest_by_label).all():
            remedy = _ROUNDED_REMEDY
        elif _has_non_ascii_text(column_by_input, int(usable_rows[row])):
            remedy = _TEXTS_DIFFER_REMEDY
        raise SourceError(
            f"the model differs from expected by more than {TOLERANCE:g} plus {TOLERANCE:.2%} of the value plus "
            f"{COLUMN_SHARE_TOLERANCE:.4%} of the column's largest value for {int(is_differing_row.sum()):,} of "
            f"{len(usable_rows):,} rows, at most by {largest_text}, first for "
            f"{entity_ids[int(usable_rows[row])].as_py()!r}: "
            f"the model gives {float(outputs[row, label_index]):.7g}, expected is "
            f"{float(expected_outputs[row, label_index]):.7g}: {remedy}"
        )
    return TriedRows(float(differences.max()), nonfinite_row_count, common_output)


def _expected_outputs(
    expected_values: Any, entity_ids: Any, usable_rows: NDArray[np.int64], label_count: int
) -> NDArray[np.float64] | None:
    """Return the library's outputs for usable rows, float64 [n, labels]; raise SourceError for another shape or NaN."""
    if expected_values is None:
        return None
    matrix = np.asarray(expected_values, np.float64)
    if matrix.shape == (len(entity_ids),) and label_count == 1:
        matrix = matrix[:, None]
    if matrix.shape != (len(entity_ids), label_count):
        raise SourceError(
            f"expected has the shape {list(matrix.shape)}, but needs {[len(entity_ids), label_count]}: the output of "
            "predict_proba for each row"
        )
    expected_outputs: NDArray[np.float64] = matrix[usable_rows]
    if not (is_finite := np.isfinite(expected_outputs).all(axis=1)).all():
        value_text = "NaN" if np.isnan(expected_outputs).any() else "infinity"
        raise SourceError(
            f"expected holds {value_text} in {int((~is_finite).sum()):,} rows, first for "
            f"{entity_ids[int(usable_rows[is_finite.argmin()])].as_py()!r}: give the library's outputs for "
            "these rows, or "
            "leave the rows out"
        )
    return expected_outputs


def _has_non_ascii_text(column_by_input: Mapping[str, Any], row_index: int) -> bool:
    """True if a text of the row has a character beyond ASCII."""
    return any(
        not str(value).isascii() for column in column_by_input.values() for value in _texts_in_cell(column[row_index])
    )


def _texts_in_cell(cell: Any) -> list[str]:
    cell_values = cell.as_py() if isinstance(cell.as_py(), list) else [cell.as_py()]
    return [value for value in cell_values if isinstance(value, str)]
