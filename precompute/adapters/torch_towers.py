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

from cache.errors import SourceError
from cache.model.ranking import Metric
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import TowerSpec
from precompute.adapters.fold_in import (
    TasteCheck,
    check_taste,
    complete_rows,
    unjudged_ids,
    user_inputs,
)
from precompute.adapters.folder import OWN_TOWER, Imported, ImportReport, write_folder
from precompute.adapters.inputs import ClickMatrix, Vectors, feature_columns, ids_of, name_row
from precompute.adapters.torch_export import BoundTower, Example, export, first_line
from precompute.adapters.vectors import import_vectors
from precompute.bundles.bundle import ModelFile
from precompute.bundles.onnx_model import OnnxModel
from precompute.scoring.towers import run_named

_INDICES = ("history", "item", "user")
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
    """Make a folder of two modules of torch (or of files that `torch.save` wrote of them, with `trust`).

    Ids are in the order of the model's indices. Features are arrays by input name with a row for each id, or a table or
    the path of one (`feature_columns`); further columns of items are kept, for filters. A user tower that takes
    `user` gives the vectors of `user_ids`, and a stranger's history is folded; any other is the bundle's user tower
    itself. `clicks` are those of `from_vectors`. Raises SourceError or BundleError, naming what is wrong and the
    remedy; nothing is written then.
    """
    started_at, rng = time.perf_counter(), np.random.default_rng(seed)
    to, items = Path(to), ids_of(item_ids, "item")
    users = None if user_ids is None else ids_of(user_ids, "user")
    click_matrix = None if clicks is None else ClickMatrix.of(clicks, users, items)
    has_user_features = user_features is not None
    item_features = feature_columns(item_features, items, "item")
    user_features = feature_columns(user_features, users, "user")
    of_users = BoundTower(
        _loaded(user_tower, trust), example.user, example, len(items), "the user tower"
    )
    of_items = BoundTower(
        _loaded(item_tower, trust), example.item, example, len(items), "the item tower"
    )
    if unknown := {"user", "history"} & example.item.keys() or {"item"} & example.user.keys():
        raise SourceError(
            f"{', '.join(sorted(unknown))}: a user tower takes user and history, an item tower takes item; features "
            "have other names"
        )
    of_item = _features(example.item, item_features, items, "item")
    of_user = {}
    if users is not None and has_user_features and "user" not in example.user:
        of_user = _features(example.user, user_features, users, "user")
    further = _further(example.item, item_features, len(items))
    model, spec, _ = export(of_items)
    rows = Vectors(items, of_items.run(items, of_item))
    tables = {
        f"{entity_kind}_features": _table(entity_kind, ids, columns)
        for entity_kind, ids, columns in (
            ("item", items, of_item | further),
            ("user", users, of_user),
        )
        if columns
    }
    unused = tuple(sorted(user_features.keys() - example.user.keys()))
    limits = [*cannot]
    if "item" in example.item:
        limits.append("take in an item that it was not fitted on: the item tower has no row for it")
    item_model = ModelFile(model, spec, entity="item")
    model_name = name or type(of_users.module).__name__
    if "user" in example.user:
        vectors = Vectors(users, _embed_known_users(of_users, users, click_matrix, user_features))
        if len(example.user) > 1:
            limits.append(
                "use a stranger's features or a newer history: the user tower wants a user's index"
            )
        return import_vectors(
            to, rows, vectors, click_matrix, metric=metric, model=model_name, cannot=limits, seed=seed,
            item_tower=item_model, features=tables, further_columns=tuple(further), unused_columns=unused,
        )  # fmt: skip
    tower, user_spec, _ = export(of_users)
    nonfinite = 0
    _demand_same(user_spec.output_dims, rows.dims)
    if user_spec.features and not of_user:
        limits.append("have a night yet: name a table of these features in [sources] user_features")
        taste = TasteCheck(
            None, "the user tower takes features, and user_ids with user_features were not given"
        )
    else:
        if of_user:
            nonfinite = _count_nonfinite(tower, user_spec, users, click_matrix, of_user)
        taste = check_taste(tower, user_spec, rows.rows, click_matrix, metric, rng, of_user)
    if taste.unjudged:
        limits.append(unjudged_ids(taste.unjudged))
    for gain in taste.gains:
        limits += gain.limits()
    if user_spec.history is not None and example.is_fixed:
        limits.append(
            f"tell whether histories are padded as in training: each is filled up with {example.pad} to "
            f"{example.max_length} items (is_fixed), and a short one is wrong where the model never saw that"
        )
    if user_spec.history is not None:
        limits += _limits(example, click_matrix)
    recalls = {} if taste.recall is None else {"the user tower": taste.recall}
    imported = Imported(
        model_name, rows, tower, user_spec, metric, OWN_TOWER, recalls, None, click_matrix, tuple(limits),
        item_model, tables, further_columns=tuple(further), unused_columns=unused, user_inputs=of_user,
        nonfinite_outputs=nonfinite, share_above_random=taste.share,
    )  # fmt: skip
    return write_folder(to, imported, started_at)


def _loaded(module_or_path: Any, trust: bool) -> Any:
    """Return the module, loaded from a file only with `trust`: loading runs any pickled code."""
    if not isinstance(module_or_path, str | Path):
        return module_or_path
    if not trust:
        raise SourceError(
            f"{module_or_path} is pickled, and loading it runs whatever code is in it: give the module, or trust=True "
            "for a "
            "file of your own"
        )
    try:
        module = torch.load(Path(module_or_path), map_location="cpu", weights_only=False)
    except Exception as error:  # whatever unpickling runs into
        raise SourceError(
            f"{module_or_path}: {first_line(error)}; write it with torch.save(module, path)"
        ) from None
    if isinstance(module, Mapping):
        raise SourceError(
            f"{module_or_path} holds weights without their module: make the module, call load_state_dict, and give that"
        )
    return module


def _count_nonfinite(
    tower: OnnxModel,
    spec: TowerSpec,
    users: Any,
    clicks: ClickMatrix | None,
    features: Mapping[str, NDArray[Any]],
) -> int:
    """Return the number of users, of those with all features, whose vector is not finite.

    Raises SourceError, naming a user, if the model cannot be run on all of these, or if none has a vector.
    """
    rows = np.flatnonzero(complete_rows(features, len(users)))
    longest = 0 if spec.history is None else int(spec.history.max_length or 1)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "user_tower.onnx"
        tower.write(path)
        opened_tower = Tower.open(path, spec)
        for start in range(0, len(rows), _USERS_AT_ONCE):
            batch_rows = rows[start : start + _USERS_AT_ONCE]
            histories = (
                Histories.of([()] * len(batch_rows))
                if clicks is None
                else clicks.histories(batch_rows, longest)
            )
            batch_features = {name: values[batch_rows] for name, values in features.items()}
            vectors = run_named(
                opened_tower,
                user_inputs(spec, histories, batch_features),
                partial(name_row, "user", users, batch_rows),
            )
            count += int((~np.isfinite(vectors).all(axis=1)).sum())
    if count == len(rows):
        raise SourceError(
            f"no user of {len(users):,} has a finite vector by the user tower: are user_features there, and was the "
            "model trained to its end?"
        )
    return count


def _embed_known_users(
    tower: BoundTower, users: Any, clicks: ClickMatrix | None, features: Mapping[str, Any] | None
) -> NDArray[np.float32]:
    """Return the vectors of all users that the tower has an index for."""
    if users is None:
        raise SourceError(
            "the user tower takes a user's index: give user_ids, in the order of the indices"
        )
    histories = None
    if "history" in tower.names:
        if clicks is None:
            raise SourceError("the user tower takes a history beside the user's index: give clicks")
        histories = clicks.histories(np.arange(len(users)), tower.example.max_length)
    return tower.run(users, _features(tower.inputs, features, users, "user"), histories)


def _features(
    inputs: Mapping[str, Any], feature_arrays: Mapping[str, Any] | None, ids: Any, entity_kind: str
) -> dict[str, NDArray[Any]]:
    """Return arrays by name of the feature inputs, with a row for each id; only users may have NaN."""
    input_arrays, rows = {}, len(ids)
    for name, value in inputs.items():
        if name in _INDICES:
            continue
        if feature_arrays is None or name not in feature_arrays:
            raise SourceError(
                f"{entity_kind}_features has no {name!r}: give an array with a row for each {entity_kind} id, in their "
                "order",
                input=name,
            )
        column = feature_arrays[name]
        column = (
            column.detach().cpu().numpy()
            if isinstance(column, torch.Tensor)
            else np.asarray(column)
        )
        shape = (rows, *value.shape[1:])
        if column.shape != shape:
            raise SourceError(
                f"{entity_kind}_features: {name!r} is {list(column.shape)}, {list(shape)} is wanted: a row for each "
                f"{entity_kind} "
                "id, as wide as in the example",
                input=name,
            )
        input_arrays[name] = _as_input(
            column, value.numpy().dtype, f"{entity_kind}_features: {name!r}", ids, entity_kind
        )
    return input_arrays


def _as_input(
    column: NDArray[Any], dtype: np.dtype[Any], where: str, ids: Any, entity_kind: str
) -> NDArray[Any]:
    """Convert the column to the tower's dtype; raise SourceError, with the first id, for a value that does not fit."""
    if column.dtype.kind in "US" or any(isinstance(value, str) for value in column.flat):
        raise SourceError(
            f"{where} holds texts, and the {entity_kind} tower takes {dtype}: give the codes that the model was "
            "trained with "
            "(docs/how-to/import/torch.md, Texts in the place of codes)"
        )
    numbers = column.astype(np.float64) if column.dtype.kind == "O" else column
    if numbers.dtype.kind != "f" or (entity_kind == "user" and dtype.kind == "f"):
        return numbers.astype(dtype)
    is_bad = ~np.isfinite(numbers) if dtype.kind == "f" else numbers != np.trunc(numbers)
    is_bad = is_bad.reshape(len(ids), -1).any(axis=1)
    if is_bad.any():
        row = int(is_bad.argmax())
        value = numbers.reshape(len(ids), -1)[row]
        lack = "is not finite" if dtype.kind == "f" else "is no whole number"
        lack = "is missing or NaN" if np.isnan(value).any() else lack
        raise SourceError(
            f"{where} {lack} for {ids[row].as_py()!r}, the first of {int(is_bad.sum()):,}: give a value that the model "
            f"was trained with for an unknown one, or leave these {entity_kind}s out"
        )
    return numbers.astype(dtype)


def _further(
    inputs: Mapping[str, Any], feature_arrays: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Return the item columns that the model does not take; filters use them."""
    further_columns = {}
    for name, column in feature_arrays.items():
        if name in inputs:
            continue
        if isinstance(column, torch.Tensor):
            column = column.detach().cpu().numpy()
        values = column if isinstance(column, pa.Array) else np.asarray(column)
        if len(values) != rows:
            raise SourceError(
                f"item_features: {name!r} has {len(values):,} rows for {rows:,} item ids: give one for each, or leave "
                "it out",
                input=name,
            )
        further_columns[name] = values
    return further_columns


def _table(entity_kind: str, ids: Any, features: Mapping[str, Any]) -> Any:
    columns = {
        name: pa.array(values)
        if isinstance(values, pa.Array) or values.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        for name, values in features.items()
    }
    return pa.table({entity_kind: ids, **columns})


def _demand_same(users: int, items: int) -> None:
    if users != items:
        raise SourceError(
            f"the user tower gives {users} numbers, the item tower {items}: give both of one fitted model"
        )


def _limits(example: Example, clicks: ClickMatrix | None) -> list[str]:
    limits = [
        f"see more of a history than its last {example.max_length:,} items (max_length of Example), or an item twice"
    ]
    if clicks is not None and not clicks.is_ordered:
        limits.append(
            "know the order of these clicks: there are no times; give a table with a column timestamp"
        )
    return limits
