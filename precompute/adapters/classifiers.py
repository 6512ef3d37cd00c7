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

from cache.errors import LarderError, SourceError
from cache.model.tower import Tower
from cache.model.tower_spec import InputDtype, InputSpec, TowerSpec
from cache.store.artefacts import write_atomically
from precompute.adapters.folder import (
    BUNDLE,
    SETTINGS,
    open_import_folder,
    reinstate_bundle,
    rows_that_refuse,
    sweep_import,
)
from precompute.adapters.inputs import feature_table, ids_of, name_row
from precompute.bundles.bundle import (
    COLUMNS_OF_INPUTS,
    Bundle,
    BundleModel,
    ModelFile,
    write_bundle,
)
from precompute.bundles.bundle_store import swap_in
from precompute.bundles.imports import note_import_begun, read_report, write_import
from precompute.bundles.onnx_model import OnnxModel, item_tower, stated_classes
from precompute.config.settings import NightConfig, night_config
from precompute.scoring.towers import demand_feature_types, run_named
from precompute.sources.plausibility import JUDGED_ROWS

FEATURES = "user_features.parquet"
TOLERANCE = 1e-4
"""Largest difference from `expected`, absolute plus relative to it: float32 against the float64 of a library."""
COLUMN_TOLERANCE = 1e-6
"""Further difference, relative to the column's largest value: float32 sums are rounded at the size of their terms."""
ROUNDING_SHARE = 1e-5
"""Share of the column's largest value up to which differences are taken for rounding, not for other inputs."""
ROWS_AT_ONCE = 8_192
NAMES_LISTED = 40
"""Number of columns that a message names."""
ROWS_OF_BOTH = 2_000
"""Number of rows on which the model of the import before is run as well, if labels have another order."""
_ROWS_DIFFER = (
    "were the same rows given to both, the same columns in the order of the training, and the same codes for "
    "categories?"
)
_ROUNDED = (
    "differences so small against the largest value are float32's: train on a smaller scale (thousands, or a "
    "logarithm)"
)
_TEXTS_DIFFER = (
    "exported tokenizers and lower-casing treat letters beyond ASCII in their own way; make texts lower-case ASCII "
    "before training, before this import, and in each request, or take the numbers of the vectorizer as features"
)

_SETTINGS = """\
# Written by an import, and never over a file that is there. All settings: `python -m cache.config.reference`.
bundle = "bundle"
artifacts = "artifacts"
state = "state"

[sources]
user_features = "{features}"     # who is scored: a row each; the next night reads it again

[tables.{table}]
kind = "value"
value = "{table}"
precision = "f4"

[serving]
precision = "fp32"     # the model itself answers for ids without a row, as at night; not its smaller int8 form
"""
_DTYPES: dict[int, InputDtype] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.STRING: "string",
}


TEXT_SHOWN: Final = "a text"
"""What the report shows in place of a long text, which may be a person's."""

TEXT_SHOWN_CHARS: Final = 40
"""Characters of a text that the report shows at most."""


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    """Findings about an imported classifier; `largest_difference` from `expected`, None if nothing was compared."""

    folder: str
    table: str
    rows: int
    incomplete_rows: int
    """Number of rows with a missing value: the night has no answer for them."""
    labels: tuple[str, ...]
    request: dict[str, Any]
    """Features of the first row, as a request sends them; in place of a long text TEXT_SHOWN."""
    largest_difference: float | None
    is_again: bool
    seconds: float
    remark: str = ""
    """Why the store could not be told to use this bundle, if it could not."""
    limits: tuple[str, ...] = ()
    """What rows of the table cannot have, or a night of them: those that are unusable."""
    earlier_labels: tuple[str, ...] = ()
    """Labels of the import before it, if they were others."""
    classes: tuple[str, ...] = ()
    """Classes as the model has them, in the order of the labels; empty if it has none."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns of the table that each input of the model takes, in its order."""
    earlier_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns of the inputs that took others, or in another order, at the import before it."""
    remarks: tuple[str, ...] = ()
    """What kept settings say otherwise than this import."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        replacement_note = f"the import before it is replaced, its {SETTINGS} kept"
        return [
            f"{self.table}: {self.rows:,} rows, labels {', '.join(self.labels)}",
            *([f"{self.folder}: {replacement_note}"] if self.is_again else []),
            *self._labels_in_words(),
            *self._columns_in_words(),
            *self._incomplete_in_words(),
            *self.remarks,
            *(f"cannot: {limit}" for limit in (self.remark, *self.limits) if limit),
            self._comparison_in_words(),
            "a request about an id without a row sends features like "
            + orjson.dumps(self.request).decode(),
            f"next: cd {self.folder}, then larder check, larder night and larder serve",
        ]

    def _comparison_in_words(self) -> str:
        if self.largest_difference is not None:
            return f"largest difference from what the library says: {self.largest_difference:.1e}"
        orders = [
            f"; {name} takes {_listed(names)}: were these in this order in the training?"
            for name, names in self.columns.items()
            if len(names) > 1
        ]
        return "".join(
            ["not compared with the library: give what it says of each row as `expected`", *orders]
        )

    def _labels_in_words(self) -> list[str]:
        remarks = []
        if self.classes and self.classes != self.labels:
            pairs = zip(self.classes, self.labels, strict=True)
            named = ", ".join(f"{name} is {label}" for name, label in pairs)
            remarks.append(f"classes of the model: {named}")
        if self.earlier_labels:
            were, are = ", ".join(self.earlier_labels), ", ".join(self.labels)
            remarks.append(
                f"labels were {were}, and are {are} from the next night on: tell who reads values"
            )
        return remarks

    def _columns_in_words(self) -> list[str]:
        return [
            f"columns of {name} were {_listed(were)}, and are {_listed(self.columns[name])}: requests send their "
            "values in this order from the next night on"
            for name, were in self.earlier_columns.items()
        ]

    def _incomplete_in_words(self) -> list[str]:
        if not self.incomplete_rows:
            return []
        remark = "rows lack a value and get no answer: fill it with what the model was trained with for a missing one"
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
    """Make a folder of a model in ONNX (a path, bytes or a ModelProto) and a table with a row for each id.

    `features` is a table of Arrow, pandas or polars, or the path of a Parquet or CSV file. A model with one input takes
    `columns` side by side, by default all but `id_column`; each of several inputs takes the column of its name.
    `output` is what the model gives for each label, by default its only float output, or the one named like
    probabilities. `expected` [rows, labels] is what the library says of each row. Raises SourceError or BundleError,
    naming what is wrong and the remedy; nothing is written then.
    """
    started_at, to = time.perf_counter(), Path(to)
    rows = feature_table(features, "features", id_column)
    if id_column not in rows.column_names:
        raise SourceError(
            f"features has no column {id_column!r} of ids; it has {', '.join(rows.column_names)}: name it by id_column"
        )
    ids = ids_of(rows[id_column], "user")
    _demand_labels(labels)
    graph = _serialised(model)
    onnx_graph = _parsed(graph)
    columns_by_input = _columns_by_input(onnx_graph, rows.drop_columns([id_column]), columns)
    spec, inputs = _bound(onnx_graph, rows, columns_by_input, output, labels)
    classes = stated_classes(onnx_graph, len(labels))
    _demand_order_of_classes(labels, classes)
    is_new = not to.exists()
    earlier_report = read_report(to)
    earlier_labels = tuple(earlier_report.get("labels", labels))
    earlier_columns = {
        name: tuple(earlier_report.get("columns", {}).get(name, names))
        for name, names in columns_by_input.items()
    }
    if columns is None and expected is None:
        _demand_order_of_columns(columns_by_input, earlier_columns)
    open_import_folder(to)
    sweep_import(to)
    _demand_tables(to, table)
    staging_folder = to / f".{BUNDLE}.{secrets.token_hex(4)}.part"
    try:
        user_tower = ModelFile(OnnxModel(graph), spec)
        labelled = ModelFile(OnnxModel(graph), spec, labels=tuple(labels))
        # Labels are the items, with a unit vector each: the score of a label is what the model gives for it.
        items = ModelFile(
            item_tower(np.eye(len(labels), dtype=np.float32)),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", len(labels)),
            entity="item",
        )
        bundle = write_bundle(
            staging_folder, name=table, version="1", dims=len(labels), item_ids=list(labels), user_tower=user_tower,
            item_tower=items,
            values={table: labelled}, training={"imported": "classifier", COLUMNS_OF_INPUTS: columns_by_input},
        )  # fmt: skip
        tower = Tower.open(bundle.values[table].path, spec)
        is_usable = np.stack([_usable(column) for column in inputs.values()]).all(axis=0)
        usable_rows = np.flatnonzero(is_usable)
        if not len(usable_rows):
            raise _no_usable_row_error(rows.drop_columns([id_column]), len(ids))
        tried = _try_rows(tower, inputs, expected, ids, usable_rows)
        if tuple(labels) not in (classes, earlier_labels):
            rows_of_both = usable_rows[:ROWS_OF_BOTH]
            fed = {
                spec_.name: _fed(inputs[spec_.name], spec_, rows_of_both) for spec_ in spec.inputs
            }
            _demand_order_of_before(to, bundle.values[table], tower, fed)
        note_import_begun(to)
        swap_in(staging_folder, to / BUNDLE)
    except BaseException:
        if is_new:
            shutil.rmtree(to, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    feature_rows = pa.table({"user": ids, **inputs})
    pq.write_table(feature_rows, to / f".{FEATURES}.part")
    (to / f".{FEATURES}.part").replace(to / FEATURES)
    is_again = (to / SETTINGS).exists()
    if not is_again:
        write_atomically(to / SETTINGS, _SETTINGS.format(features=FEATURES, table=table).encode())
    remark = reinstate_bundle(to) if is_again else ""
    request = {name: _shown(column[int(usable_rows[0])].as_py()) for name, column in inputs.items()}
    limits = rows_that_refuse(to, feature_rows, spec, tried.nonfinite)
    if tried.same_values is not None and len(usable_rows) >= JUDGED_ROWS:
        values = ", ".join(f"{value:g}" for value in tried.same_values)
        limit = (
            f"tell one row from another: all {len(usable_rows):,} rows get the same answer ({values}), and the gate "
            "distinct_values refuses a night of it: was the model trained to its end, on these columns?"
        )
        limits += (limit,)
    report = ClassifierReport(
        folder=str(to),
        table=table,
        rows=len(ids),
        incomplete_rows=int((~is_usable).sum()),
        labels=tuple(labels),
        request=request,
        largest_difference=tried.difference,
        is_again=is_again,
        seconds=round(time.perf_counter() - started_at, 3),
        remark=remark,
        limits=limits,
        earlier_labels=() if earlier_labels == tuple(labels) else earlier_labels,
        classes=classes,
        columns=columns_by_input,
        earlier_columns={
            name: names
            for name, names in earlier_columns.items()
            if names != columns_by_input[name]
        },
        remarks=_kept_settings_in_words(to, table) if is_again else (),
    )
    source = str(model) if isinstance(model, str | Path) else ""
    write_import(to, report.to_json(), bundle.digest, source)
    return report


def _demand_tables(to: Path, table: str) -> None:
    """Raise SourceError if kept settings have a table of a value that this import does not make."""
    try:
        config = night_config(str(to / SETTINGS)) if (to / SETTINGS).exists() else NightConfig()
    except LarderError:  # kept settings that `larder check` will name
        return
    if config.tables == NightConfig().tables:
        return
    for name, table_config in config.tables.items():
        if table_config.kind == "value" and table_config.value != table:
            raise SourceError(
                f"[tables.{name}] in {to / SETTINGS} is of the value {table_config.value!r}, and this import makes "
                f"{table!r} alone: import with --table {table_config.value}, name another folder, or change the file"
            )


def _demand_labels(labels: Sequence[str]) -> None:
    """Raise SourceError for labels that are missing, empty or repeated."""
    if not labels:
        raise SourceError("labels are empty: give a name for each number that the model gives")
    for position, label in enumerate(labels):
        if not label:
            raise SourceError(
                f"label {position + 1} of {','.join(labels)} is empty: give it a name"
            )
        if label in labels[:position]:
            raise SourceError(f"label {label!r} is there twice: give each number a name of its own")


def _demand_order_of_classes(labels: Sequence[str], classes: tuple[str, ...]) -> None:
    """Raise SourceError for a label that is one of the model's classes, at another place."""
    if any(label in classes and classes.index(label) != at for at, label in enumerate(labels)):
        raise SourceError(
            f"labels are {', '.join(labels)}, and the model's classes are {', '.join(classes)}, in this order: "
            "numbers would stand under wrong names; give the labels in the order of the classes"
        )


def _demand_order_of_columns(
    columns: Mapping[str, tuple[str, ...]], earlier_columns: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise SourceError for an input whose columns the table has in another order than at the import before."""
    for name, names in columns.items():
        before = earlier_columns[name]
        if before != names and sorted(before) == sorted(names):
            raise SourceError(
                f"columns of {name!r} are {_listed(names)} in this table, and were {_listed(before)} at the import "
                "before, and a model takes them by their place: name them in the order of the training as columns, or "
                "give expected"
            )


def _shown(value: object) -> object:
    """Return a feature's value for the report."""
    if isinstance(value, list):
        return [_shown(part) for part in value]
    return TEXT_SHOWN if isinstance(value, str) and len(value) > TEXT_SHOWN_CHARS else value


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of all where there are more."""
    listed = ", ".join(names[:NAMES_LISTED])
    return listed if len(names) <= NAMES_LISTED else f"{listed}, ... ({len(names)} in all)"


def _demand_order_of_before(
    to: Path, model: BundleModel, tower: Tower, fed: Mapping[str, NDArray[Any]]
) -> None:
    """Raise SourceError if labels have another order than before, and the numbers of a retrained model have not.

    Two trainings say about the same of one row: where numbers are nearer to those of before by their place than by
    their label, labels were given in a wrong order. The same model is imported again to correct labels.
    """
    try:
        before = Bundle.read(to / BUNDLE).values[model.name]
        is_reordered = before.labels != model.labels and set(before.labels) == set(model.labels)
        if not is_reordered or before.spec != model.spec or before.digest == model.digest:
            return
        numbers, earlier_numbers = tower.run(fed), Tower.open(before.path, before.spec).run(fed)
    except (LarderError, KeyError):  # what cannot be compared proves nothing
        return
    by_label = earlier_numbers[:, [before.labels.index(label) for label in model.labels]]
    off_by_place = float(np.abs(numbers - earlier_numbers).mean())
    off_by_label = float(np.abs(numbers - by_label).mean())
    if off_by_place < off_by_label:
        raise SourceError(
            f"labels are {', '.join(model.labels)}, and were {', '.join(before.labels)} at the import before, but the "
            f"model's numbers have kept their places: over {len(numbers):,} rows they differ from those of before by "
            f"{off_by_place:.2g} by place, and by {off_by_label:.2g} by label; give the labels in the order of before. "
            f"If that order was wrong, import {BUNDLE}/{before.path.name} with the right one first"
        )


def _kept_settings_in_words(to: Path, table: str) -> tuple[str, ...]:
    """Return remarks on kept settings by which nights use another bundle or table, or make no table of the model."""
    try:
        config = night_config(str(to / SETTINGS))
    except LarderError:  # `larder check` will name it
        return ()
    remarks, features = [], config.sources.user_features
    if config.path(config.bundle).resolve() != (to / BUNDLE).resolve():
        remarks.append(
            f"nights use the bundle {config.bundle}, which {SETTINGS} names, not this import's: name {BUNDLE} there"
        )
    if all(table_config.value != table for table_config in config.tables.values()):
        remarks.append(
            f"nights make no table of {table}: {SETTINGS} has no [tables.{table}] with kind and value (kind = "
            f'"value", value = "{table}")'
        )
    if features is None or config.path(features).resolve() != (to / FEATURES).resolve():
        remark = (
            f"nights read {features or 'no features'} ([sources] user_features in {SETTINGS}), not the rows of "
            f"this import, which are in {FEATURES}"
        )
        try:
            demand_feature_types(config, Bundle.read(to / BUNDLE))
        except LarderError as error:
            remark += f"; that table does not fit the model: {error.message}"
        remarks.append(remark)
    return tuple(remarks)


def _no_usable_row_error(rows: Any, count: int) -> SourceError:
    """Return the error of a table in which no row is complete, with the columns that have no value at all."""
    empty = [
        repr(name) for name in rows.column_names if not _usable(rows[name].combine_chunks()).any()
    ]
    reason = (
        f"{', '.join(empty)} has no value in any" if empty else "each lacks a value in a column"
    )
    return SourceError(
        f"no row of features can be used, of {count:,}: {reason}: fill in what the model was trained with for a "
        "missing value"
    )


def _serialised(model: Any) -> bytes:
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
        "for scikit-learn), and give the path or what the export returned"
    )


def _parsed(graph: bytes) -> onnx.GraphProto:
    try:
        return onnx.load_from_string(graph).graph
    except Exception as error:  # Protocol Buffers' errors share no base class
        raise SourceError(f"model is no ONNX model: {error}") from None


def _inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    constants = {tensor.name for tensor in graph.initializer}
    return [graph_input for graph_input in graph.input if graph_input.name not in constants]


def _columns_by_input(
    graph: onnx.GraphProto, rows: Any, columns: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the columns of the table that each input takes; raise SourceError for one that it lacks."""
    names = [graph_input.name for graph_input in _inputs_of(graph)]
    all_columns: tuple[str, ...] = tuple(rows.column_names if columns is None else columns)
    columns_by_input = {name: (name,) if len(names) > 1 else all_columns for name in names}
    for column in (column for names in columns_by_input.values() for column in names):
        if column not in rows.column_names:
            raise SourceError(
                f"features has no column {column!r}, which the model takes; it has {', '.join(rows.column_names)}"
            )
    return columns_by_input


def _bound(
    graph: onnx.GraphProto,
    rows: Any,
    columns_by_input: Mapping[str, tuple[str, ...]],
    output: str | None,
    labels: Sequence[str],
) -> tuple[TowerSpec, dict[str, Any]]:
    """The specification of the model, and its inputs for all rows, by input name, as Arrow columns."""
    graph_inputs = _inputs_of(graph)
    for graph_input in graph_inputs:
        if graph_input.type.tensor_type.elem_type not in _DTYPES:
            raise SourceError(
                f"input {graph_input.name!r} of the model holds no float32, int32, int64 or text: export it with "
                "FloatTensorType, Int64TensorType or StringTensorType"
            )
    name = _output(graph, output, len(labels))
    specs, inputs = [], {}
    for graph_input in graph_inputs:
        input_columns = columns_by_input[graph_input.name]
        spec = _input_spec(graph_input, input_columns)
        specs.append(spec)
        inputs[graph_input.name] = _column(rows.select(input_columns), spec)
    return TowerSpec(tuple(specs), name, len(labels)), inputs


def _output(model: Any, output: str | None, labels: int) -> str:
    """Name of the output with a number for each label."""
    floats = {
        graph_output.name: _width(graph_output)
        for graph_output in model.output
        if graph_output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    output_names = (
        [output] if output else [name for name in floats if len(floats) == 1 or "prob" in name]
    )
    if (
        any(graph_output.type.HasField("sequence_type") for graph_output in model.output)
        and not floats
    ):
        raise SourceError(
            "the model gives a list of dictionaries: export it with zipmap off (skl2onnx: "
            "options={LogisticRegression: {'zipmap': False}}; onnxmltools: zipmap=False)"
        )
    if len(output_names) != 1 or output_names[0] not in floats:
        raise SourceError(
            f"the model's outputs of numbers are {', '.join(floats) or 'none'}: name the one with a number for each "
            "label as output"
        )
    width = floats[output_names[0]]
    if width is not None and width != labels:
        raise SourceError(
            f"output {output_names[0]!r} has {width} numbers, and there are {labels} labels: give one label for each, "
            "in the "
            "order of the model's classes"
        )
    return output_names[0]


def _width(value: Any) -> int | None:
    """Number of columns of a matrix [rows, columns]; None of a vector [rows], or where the model does not say."""
    sizes = value.type.tensor_type.shape.dim
    return int(sizes[1].dim_value) or None if len(sizes) > 1 else None


def _input_spec(graph_input: Any, columns: Sequence[str]) -> InputSpec:
    dtype = _DTYPES[graph_input.type.tensor_type.elem_type]
    if (axes := len(graph_input.type.tensor_type.shape.dim)) > 2:
        raise SourceError(
            f"input {graph_input.name!r} of the model has {axes} axes, and features are rows and columns: export the "
            "model with an input [rows, columns]"
        )
    is_matrix = len(graph_input.type.tensor_type.shape.dim) > 1
    width = _width(graph_input)
    if not is_matrix and len(columns) > 1:
        width = 1
    if width is not None and width != len(columns):
        raise SourceError(
            f"input {graph_input.name!r} of the model takes {width} columns, not the {len(columns)} of features "
            f"({', '.join(columns)}): name those in the order of the training as columns"
        )
    return InputSpec(
        graph_input.name,
        "feature",
        dtype,
        column=graph_input.name,
        width=len(columns) if is_matrix else None,
    )


def _column(rows: Any, spec: InputSpec) -> Any:
    """The rows of an input as one Arrow column: values, or lists of them, null where a value is missing."""
    target = {"float32": pa.float32(), "string": pa.string()}.get(spec.dtype, pa.int64())
    parts = []
    for name in rows.column_names:
        column = rows[name].combine_chunks()
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        try:
            parts.append(column.cast(target, safe=target != pa.float32()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SourceError(
                f"features: column {name!r} is {column.type}, and input {spec.name!r} of the model takes {spec.dtype}: "
                f"{error}; name the columns that the model was trained with as columns"
            ) from None
    if spec.width is None or (spec.dtype == "string" and spec.width == 1):
        return parts[0]
    width, count = len(parts), rows.num_rows
    values = pa.concat_arrays(parts).take(
        pa.array(np.arange(width * count).reshape(width, count).T.ravel())
    )
    return pa.FixedSizeListArray.from_arrays(values, width)


def _usable(column: Any) -> NDArray[np.bool_]:
    """Mask of the rows in which no value is missing or NaN."""
    values = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    is_there: NDArray[np.bool_] = np.asarray(pc.is_valid(values))
    if pa.types.is_floating(values.type):
        is_there = is_there & np.asarray(pc.fill_null(pc.is_finite(values), False))
    return np.asarray(is_there.reshape(len(column), -1).all(axis=1), np.bool_)


def _fed(column: Any, spec: InputSpec, rows: NDArray[np.int64]) -> NDArray[Any]:
    """The input as the model takes it."""
    selected_column = column.take(pa.array(rows))
    if pa.types.is_fixed_size_list(selected_column.type):
        selected_column = selected_column.flatten()
    values = np.asarray(
        selected_column.to_pylist(), object if spec.dtype == "string" else spec.dtype
    )
    return values if spec.width is None else values.reshape(len(rows), spec.width)


@dataclass(frozen=True, slots=True, eq=False)
class TriedRows:
    """Result of a run over all usable rows.

    `difference`: the largest from `expected`, None if nothing was compared; `nonfinite`: rows with an output that is
    not finite; `same_values`: the output of every row, if it is one and the same.
    """

    difference: float | None
    nonfinite: int
    same_values: NDArray[np.float32] | None


def _try_rows(
    tower: Tower, inputs: Mapping[str, Any], expected: Any, ids: Any, usable: NDArray[np.int64]
) -> TriedRows:
    """Run the model on all usable rows, of which there is one at least.

    Raises SourceError for a row on which the model fails, for outputs of which none is finite, for an `expected` that
    is not finite, and for outputs beyond the tolerance; it names the first id.
    """
    expected_outputs = _expected_outputs(expected, ids, usable, tower.spec.output_dims)
    outputs = np.empty((len(usable), tower.spec.output_dims), np.float32)
    for start in range(0, len(usable), ROWS_AT_ONCE):
        rows = usable[start : start + ROWS_AT_ONCE]
        outputs[start : start + len(rows)] = run_named(
            tower,
            {
                input_spec.name: _fed(inputs[input_spec.name], input_spec, rows)
                for input_spec in tower.spec.inputs
            },
            partial(name_row, "row of", ids, rows),
        )
    nonfinite = int((~np.isfinite(outputs).all(axis=1)).sum())
    if nonfinite == len(usable):
        raise SourceError(
            f"no output of the model is finite, on none of {len(usable):,} rows: was it trained to its end, and are "
            "the columns in the order of the training?"
        )
    same_values = outputs[0] if (outputs == outputs[0]).all() else None
    if expected_outputs is None:
        return TriedRows(None, nonfinite, same_values)
    differences = np.abs(outputs - expected_outputs)
    largest = np.abs(expected_outputs).max(axis=0)
    tolerances = TOLERANCE + TOLERANCE * np.abs(expected_outputs) + COLUMN_TOLERANCE * largest
    is_off = ~(differences <= tolerances)  # also where the output is not a number
    if (is_off_row := is_off.any(axis=1)).any():
        row = int(is_off_row.argmax())
        label = int(is_off[row].argmax())
        off_differences = differences[is_off_row]
        finite_differences = off_differences[np.isfinite(off_differences)]
        at_most = f"{finite_differences.max():.2g}" if len(finite_differences) else "not finite"
        remedy = _ROWS_DIFFER
        if (off_differences <= ROUNDING_SHARE * largest).all():
            remedy = _ROUNDED
        elif _has_odd_letters(inputs, int(usable[row])):
            remedy = _TEXTS_DIFFER
        raise SourceError(
            f"the model differs from expected by more than {TOLERANCE:g} plus {TOLERANCE:.2%} of the value plus "
            f"{COLUMN_TOLERANCE:.4%} of the column's largest for {int(is_off_row.sum()):,} of {len(usable):,} rows, at "
            f"most by {at_most}, first for {ids[int(usable[row])].as_py()!r}, of which the model says "
            f"{float(outputs[row, label]):.7g} and expected {float(expected_outputs[row, label]):.7g}: {remedy}"
        )
    return TriedRows(float(differences.max()), nonfinite, same_values)


def _expected_outputs(
    expected: Any, ids: Any, usable: NDArray[np.int64], labels: int
) -> NDArray[np.float64] | None:
    """Return what the library says of usable rows, float64 [n, labels]; raise SourceError for another shape or NaN."""
    if expected is None:
        return None
    matrix = np.asarray(expected, np.float64)
    if matrix.shape == (len(ids),) and labels == 1:
        matrix = matrix[:, None]
    if matrix.shape != (len(ids), labels):
        raise SourceError(
            f"expected is {list(matrix.shape)}, {[len(ids), labels]} is wanted: what predict_proba says of each row"
        )
    expected_outputs: NDArray[np.float64] = matrix[usable]
    if not (is_finite := np.isfinite(expected_outputs).all(axis=1)).all():
        what = "NaN" if np.isnan(expected_outputs).any() else "infinity"
        raise SourceError(
            f"expected holds {what} in {int((~is_finite).sum()):,} rows, first for "
            f"{ids[int(usable[is_finite.argmin()])].as_py()!r}: give what the library says of these rows, or leave the "
            "rows out"
        )
    return expected_outputs


def _has_odd_letters(inputs: Mapping[str, Any], row: int) -> bool:
    """True if a text of the row has a character beyond ASCII."""
    return any(
        not str(value).isascii() for column in inputs.values() for value in _texts(column[row])
    )


def _texts(cell: Any) -> list[str]:
    values = cell.as_py() if isinstance(cell.as_py(), list) else [cell.as_py()]
    return [value for value in values if isinstance(value, str)]
