"""Import of a pair of torch modules. Needs torch and onnxscript."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from cache.config.night import Sources
from cache.errors import SourceError
from cache.model.ranking import Metric
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import TowerSpec
from precompute.adapters.fold_in import (
    UserTowerCheck,
    check_user_tower,
    complete_row_mask,
    unjudged_ids_limit,
    user_inputs,
)
from precompute.adapters.folder import OWN_TOWER_FOLD_IN, ImportedModel, ImportReport, write_folder
from precompute.adapters.inputs import ClickMatrix, EntityVectors, checked_ids, feature_columns, name_row
from precompute.adapters.torch_export import BoundTower, Example, export_tower, first_message_line
from precompute.adapters.vectors import import_vectors
from precompute.bundles.bundle import ModelFile
from precompute.bundles.onnx_model import OnnxModel
from precompute.scoring.towers import run_named

_INDEX_INPUTS = ("history", "item", "user")
_USERS_AT_ONCE = 1 << 16


def from_torch(
    user_tower: Any,
    item_tower: Any,
    example: Example,
    *,
    to: str | Path,
    item_ids: Any,
    user_ids: Any = None,
    clicks: Any = None,
    item_features: Any = None,
    user_features: Any = None,
    metric: Metric = "inner_product",
    name: str | None = None,
    cannot: Sequence[str] = (),
    trust: bool = False,
    seed: int = 0,
) -> ImportReport:
    """Make a folder of two torch modules (or of files that `torch.save` wrote of them, with `trust`).

    Ids are in the order of the model's indices. Features are arrays by input name with a row for each id, or a table or
    the path of one (`feature_columns`); further columns of items are kept for filters. If the user tower takes `user`,
    it gives the vectors of `user_ids`, and an unknown user's history becomes a vector as in `from_vectors`; any other
    user tower becomes that of the bundle. `clicks` are those of `from_vectors`. Raises SourceError or BundleError,
    naming the cause and the remedy, and writes nothing then.
    """
    started_at, rng = time.perf_counter(), np.random.default_rng(seed)
    to, item_texts = Path(to), checked_ids(item_ids, "item")
    user_texts = None if user_ids is None else checked_ids(user_ids, "user")
    click_matrix = None if clicks is None else ClickMatrix.of(clicks, user_texts, item_texts)
    has_user_features = user_features is not None
    sources = clicks if isinstance(clicks, Sources) else None
    item_features, item_limits = feature_columns(item_features, item_texts, "item", sources)
    user_features, user_limits = feature_columns(user_features, user_texts, "user", sources)
    bound_user_tower = BoundTower(
        _load_module(user_tower, trust), example.user, example, len(item_texts), "the user tower"
    )
    bound_item_tower = BoundTower(
        _load_module(item_tower, trust), example.item, example, len(item_texts), "the item tower"
    )
    if misplaced_inputs := {"user", "history"} & example.item.keys() or {"item"} & example.user.keys():
        raise SourceError(
            f"{', '.join(sorted(misplaced_inputs))}: only the user tower takes user and history, only the item tower "
            "takes item; give features other names"
        )
    item_inputs = _feature_arrays(example.item, item_features, item_texts, "item")
    user_feature_inputs = {}
    if user_texts is not None and has_user_features and "user" not in example.user:
        user_feature_inputs = _feature_arrays(example.user, user_features, user_texts, "user")
    further_columns = _further_item_columns(example.item, item_features, len(item_texts))
    item_onnx, item_spec, _ = export_tower(bound_item_tower)
    item_vectors = EntityVectors(item_texts, bound_item_tower.run(item_texts, item_inputs))
    table_by_setting = {
        f"{entity_kind}_features": _feature_table(entity_kind, entity_ids, columns)
        for entity_kind, entity_ids, columns in (
            ("item", item_texts, _as_precise_as_given(item_inputs, item_features) | further_columns),
            ("user", user_texts, user_feature_inputs),
        )
        if columns
    }
    unused_columns = tuple(sorted(user_features.keys() - example.user.keys()))
    limit_texts = [*cannot, *item_limits, *user_limits]
    if "item" in example.item:
        limit_texts.append("take in an item that it was not fitted on: the item tower has no row for it")
    item_model = ModelFile(item_onnx, item_spec, entity="item")
    model_name = name or type(bound_user_tower.module).__name__
    if "user" in example.user:
        user_vectors = EntityVectors(
            user_texts, _embed_known_users(bound_user_tower, user_texts, click_matrix, user_features)
        )
        if len(example.user) > 1:
            limit_texts.append("use an unknown user's features or a newer history: the user tower needs a user's index")
        return import_vectors(
            to, item_vectors, user_vectors, click_matrix, metric=metric, model_title=model_name,
            model_limit_texts=limit_texts,
            seed=seed,
            item_tower=item_model, feature_table_by_setting=table_by_setting, further_columns=tuple(further_columns),
            unused_columns=unused_columns,
        )  # fmt: skip
    user_onnx, user_spec, _ = export_tower(bound_user_tower)
    nonfinite_count = 0
    _demand_same_dims(user_spec.output_dims, item_vectors.dims)
    if user_spec.features and not user_feature_inputs:
        limit_texts.append("have a night yet: name a table of these features in [sources] user_features")
        given_by_name = {"user_ids": user_texts is not None, "user_features": has_user_features}
        lacking_names = " and ".join(name for name, is_given in given_by_name.items() if not is_given)
        lack = f"{lacking_names} {'was' if any(given_by_name.values()) else 'were'} not given"
        tower_check = UserTowerCheck(None, f"the user tower takes features, but {lack}")
    else:
        if user_feature_inputs:
            nonfinite_count = _count_nonfinite(user_onnx, user_spec, user_texts, click_matrix, user_feature_inputs)
        tower_check = check_user_tower(
            user_onnx, user_spec, item_vectors.vectors, click_matrix, metric, rng, user_feature_inputs
        )
    if tower_check.unjudged_reason:
        limit_texts.append(unjudged_ids_limit(tower_check.unjudged_reason))
    for gain in tower_check.gains:
        limit_texts += gain.limit_texts()
    if user_spec.history is not None and example.is_fixed:
        limit_texts.append(
            f"tell whether histories are padded as in training: each is padded with {example.pad} to "
            f"{example.max_length} items (is_fixed), and answers for short ones are wrong if the training had none"
        )
    if user_spec.history is not None:
        limit_texts += _history_limits(example, click_matrix)
    recalls = {} if tower_check.held_out_recall is None else {"the user tower": tower_check.held_out_recall}
    imported = ImportedModel(
        model_name, item_vectors, user_onnx, user_spec, metric, OWN_TOWER_FOLD_IN, recalls, None, click_matrix,
        tuple(limit_texts),
        item_model, table_by_setting, further_columns=tuple(further_columns), unused_columns=unused_columns,
        user_inputs=user_feature_inputs,
        nonfinite_user_count=nonfinite_count, share_above_random=tower_check.share_above_random,
    )  # fmt: skip
    return write_folder(to, imported, started_at)


def _load_module(module_or_path: Any, trust: bool) -> Any:
    """Return the module; load it from a file only with `trust`, since loading runs any code in a pickle."""
    if not isinstance(module_or_path, str | Path):
        return module_or_path
    if not trust:
        raise SourceError(
            f"{module_or_path} is pickled, and loading it runs any code in it: give the module, or set trust=True for "
            "a file from a trusted source"
        )
    try:
        module = torch.load(Path(module_or_path), map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling may raise any exception
        raise SourceError(
            f"{module_or_path}: {first_message_line(error)}; write it with torch.save(module, path)"
        ) from None
    if isinstance(module, Mapping):
        raise SourceError(
            f"{module_or_path} holds weights without a module: make the module, call load_state_dict, and give the "
            "module"
        )
    return module


def _count_nonfinite(
    tower: OnnxModel, spec: TowerSpec, user_ids: Any, clicks: ClickMatrix | None, features: Mapping[str, NDArray[Any]]
) -> int:
    """Return the number of users with all features but a vector that is not finite.

    Raises SourceError if the model fails on a user, naming the user, or if no user has a finite vector.
    """
    complete_rows = np.flatnonzero(complete_row_mask(features, len(user_ids)))
    history_items_max = 0 if spec.history is None else int(spec.history.max_length or 1)
    nonfinite_count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "user_tower.onnx"
        tower.write(path)
        opened_tower = Tower.open(path, spec)
        for batch_start in range(0, len(complete_rows), _USERS_AT_ONCE):
            batch_rows = complete_rows[batch_start : batch_start + _USERS_AT_ONCE]
            histories = (
                Histories.of([()] * len(batch_rows))
                if clicks is None
                else clicks.histories(batch_rows, history_items_max)
            )
            batch_features = {name: feature_values[batch_rows] for name, feature_values in features.items()}
            vectors = run_named(
                opened_tower,
                user_inputs(spec, histories, batch_features),
                partial(name_row, "user", user_ids, batch_rows),
            )
            nonfinite_count += int((~np.isfinite(vectors).all(axis=1)).sum())
    if nonfinite_count == len(complete_rows):
        raise SourceError(
            f"the user tower gives a finite vector for none of {len(user_ids):,} users: are user_features given, and "
            "was the training finished?"
        )
    return nonfinite_count


def _embed_known_users(
    tower: BoundTower, user_ids: Any, clicks: ClickMatrix | None, feature_by_input: Mapping[str, Any] | None
) -> NDArray[np.float32]:
    """Return the vectors of all users for which the tower has an index."""
    if user_ids is None:
        raise SourceError("the user tower takes a user's index: give user_ids, in the order of the indices")
    histories = None
    if "history" in tower.names:
        if clicks is None:
            raise SourceError("the user tower takes a history in addition to the user's index: give clicks")
        histories = clicks.histories(np.arange(len(user_ids)), tower.example.max_length)
    return tower.run(user_ids, _feature_arrays(tower.inputs, feature_by_input, user_ids, "user"), histories)


def _feature_arrays(
    example_by_input: Mapping[str, Any], feature_arrays: Mapping[str, Any] | None, entity_ids: Any, entity_kind: str
) -> dict[str, NDArray[Any]]:
    """Return arrays by name for the feature inputs, with a row for each id; only those of users may have NaN."""
    input_arrays, row_count = {}, len(entity_ids)
    for input_name, example_tensor in example_by_input.items():
        if input_name in _INDEX_INPUTS:
            continue
        if feature_arrays is None or input_name not in feature_arrays:
            raise SourceError(
                f"{entity_kind}_features has no {input_name!r}: give an array with a row for each {entity_kind} id, in "
                "the order of the ids",
                input=input_name,
            )
        column = feature_arrays[input_name]
        column = column.detach().cpu().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
        expected_shape = (row_count, *example_tensor.shape[1:])
        if column.shape != expected_shape:
            raise SourceError(
                f"{entity_kind}_features: {input_name!r} has the shape {list(column.shape)}, but needs "
                f"{list(expected_shape)}: a row for each {entity_kind} id, as wide as in the example",
                input=input_name,
            )
        input_arrays[input_name] = _to_input_dtype(
            column, example_tensor.numpy().dtype, f"{entity_kind}_features: {input_name!r}", entity_ids, entity_kind
        )
    return input_arrays


def _to_input_dtype(
    feature_column: NDArray[Any], dtype: np.dtype[Any], column_text: str, entity_ids: Any, entity_kind: str
) -> NDArray[Any]:
    """Convert the column to the tower's dtype; raise SourceError, with the first id, if a value does not fit."""
    if feature_column.dtype.kind in "US" or any(isinstance(value, str) for value in feature_column.flat):
        raise SourceError(
            f"{column_text} holds texts, but the {entity_kind} tower takes {dtype}: give the codes of the training "
            "(docs/how-to/import/torch.md, Texts in the place of codes)"
        )
    numbers = feature_column.astype(np.float64) if feature_column.dtype.kind == "O" else feature_column
    if numbers.dtype.kind != "f" or (entity_kind == "user" and dtype.kind == "f"):
        return numbers.astype(dtype)
    is_bad_row = ~np.isfinite(numbers) if dtype.kind == "f" else numbers != np.trunc(numbers)
    is_bad_row = is_bad_row.reshape(len(entity_ids), -1).any(axis=1)
    if is_bad_row.any():
        row = int(is_bad_row.argmax())
        row_numbers = numbers.reshape(len(entity_ids), -1)[row]
        lack_text = "is not finite" if dtype.kind == "f" else "is not an integer"
        lack_text = "is missing or NaN" if np.isnan(row_numbers).any() else lack_text
        raise SourceError(
            f"{column_text} {lack_text} for {entity_ids[row].as_py()!r}, the first of {int(is_bad_row.sum()):,}: give "
            f"the value that stood for an unknown one in the training, or leave these {entity_kind}s out"
        )
    return numbers.astype(dtype)


def _as_precise_as_given(
    input_by_name: Mapping[str, NDArray[Any]], feature_by_name: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """Return the inputs for the folder's table, whose numbers filters compare: as float64 unless given as less.

    The tower takes float32, which would turn a price of 7.49 into 7.4899998.
    """
    stored_by_name = dict(input_by_name)
    for name, input_values in input_by_name.items():
        given = feature_by_name[name]
        given_values = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
        if input_values.dtype.kind == "f" and given_values.dtype not in (np.float16, np.float32):
            stored_by_name[name] = given_values.astype(np.float64)
    return stored_by_name


def _further_item_columns(
    example_by_input: Mapping[str, Any], feature_arrays: Mapping[str, Any], row_count: int
) -> dict[str, Any]:
    """Return the item columns that the model does not take, for filters."""
    further_columns = {}
    for column_name, column in feature_arrays.items():
        if column_name in example_by_input:
            continue
        if isinstance(column, torch.Tensor):
            column = column.detach().cpu().numpy()
        column_values = column if isinstance(column, pa.Array) else np.asarray(column)
        if len(column_values) != row_count:
            raise SourceError(
                f"item_features: {column_name!r} has {len(column_values):,} rows for {row_count:,} item ids: give one "
                "for each id, or leave the column out",
                input=column_name,
            )
        further_columns[column_name] = column_values
    return further_columns


def _feature_table(entity_kind: str, entity_ids: Any, feature_by_name: Mapping[str, Any]) -> Any:
    columns = {
        name: pa.array(feature_values)
        if isinstance(feature_values, pa.Array) or feature_values.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(feature_values.ravel()), feature_values.shape[1])
        for name, feature_values in feature_by_name.items()
    }
    return pa.table({entity_kind: entity_ids, **columns})


def _demand_same_dims(user_dims: int, item_dims: int) -> None:
    if user_dims != item_dims:
        raise SourceError(
            f"the user tower gives {user_dims} numbers, the item tower {item_dims}: give both towers of the same "
            "fitted model"
        )


def _history_limits(example: Example, clicks: ClickMatrix | None) -> list[str]:
    limits = [f"use more than the last {example.max_length:,} items of a history (max_length), or repeats of an item"]
    if clicks is not None and not clicks.is_time_ordered:
        limits.append("know the order of these clicks: they have no times; give a table with a column timestamp")
    return limits
