"""Import of models whose scores are inner products of vectors: implicit, LightFM, scikit-learn, RecTools.

The libraries are not imported: attributes and methods of fitted objects are used, or for implicit the .npz file of
`model.save`.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.adapters.fold_in import HistoryFold
from precompute.adapters.folder import ImportReport
from precompute.adapters.inputs import ClickMatrix, EntityVectors, checked_ids
from precompute.adapters.vectors import NO_NEW_ITEM_LIMIT, import_vectors

_IMPLICIT_ATTRIBUTES = ("user_factors", "item_factors", "regularization", "alpha")

_FEATURES_LIMIT = "use features of a user or item live: they are part of the vectors, as of this import"


def from_implicit(
    model: Any, user_items: Any, *, to: str | Path, user_ids: Any = None, item_ids: Any = None, seed: int = 0
) -> ImportReport:
    """Make a folder from a fitted model of implicit (or its .npz file) and the matrix that it was fitted on.

    Ids are in the order of the matrix' rows and columns (default: row and column numbers). Known users are scored from
    their factors, exactly as `recommend(filter_already_liked_items=True)` does; an unknown user's history becomes a
    vector of ALS as by `recalculate_user`, with the median confidence for each click. Raises SourceError for a model
    that was not fitted.
    """
    attribute_by_name = (
        _read_implicit_file(Path(model)) if isinstance(model, str | Path) else _attributes_of_implicit(model)
    )
    user_factors, item_factors = (attribute_by_name.get("user_factors"), attribute_by_name.get("item_factors"))
    if user_factors is None or item_factors is None or not np.size(user_factors) or not np.size(item_factors):
        model_name = model if isinstance(model, str | Path) else type(model).__name__
        raise SourceError(f"{model_name} has no factors: call fit before it is imported")
    model_title = "implicit" if isinstance(model, str | Path) else f"implicit {type(model).__name__}"
    item_vectors, user_vectors = (
        EntityVectors.of(item_ids, item_factors, "item"),
        EntityVectors.of(user_ids, user_factors, "user"),
    )
    clicks = ClickMatrix.of(user_items, user_vectors.entity_ids, item_vectors.entity_ids)
    folds, limits = [], [NO_NEW_ITEM_LIMIT]
    if attribute_by_name.get("alpha") is not None:  # only ALS has confidences
        confidence = float(attribute_by_name["alpha"]) * clicks.median_weight
        folds.append(_als_fold(item_vectors.vectors, float(attribute_by_name["regularization"]), confidence))
        if clicks.is_weighted:
            limits.append(
                f"weigh the clicks of an unknown user's history: each counts {confidence:g}, alpha times the median "
                "weight"
            )
    return import_vectors(
        Path(to),
        item_vectors,
        user_vectors,
        clicks,
        folds=folds,
        model_title=model_title,
        model_limit_texts=limits,
        seed=seed,
    )


def from_lightfm(
    model: Any,
    interactions: Any,
    *,
    to: str | Path,
    user_ids: Any = None,
    item_ids: Any = None,
    user_features: Any = None,
    item_features: Any = None,
    seed: int = 0,
) -> ImportReport:
    """Make a folder from a fitted LightFM model, its interactions [users, items], and the features of its training.

    Ids are in the order of the interactions' rows and columns (default: row and column numbers). Known users are scored
    as `predict` does, biases included: an item is [embedding, bias, 1], a user [embedding, 1, bias]. An unknown user's
    history becomes a vector by mean or ridge, whichever has the higher held-out recall@20. Raises SourceError for a
    model that was not fitted, or for features of another model.
    """
    remedy = "call fit first, and give the features that it was fitted on"
    user_bias, user_rows = _call_model(lambda: model.get_user_representations(user_features), remedy)
    item_bias, item_rows = _call_model(lambda: model.get_item_representations(item_features), remedy)
    user_matrix = np.column_stack([user_rows, np.ones(len(user_rows), np.float32), user_bias])
    item_matrix = np.column_stack([item_rows, item_bias, np.ones(len(item_rows), np.float32)])
    return _import_vector_pair(
        to, "LightFM", user_matrix, item_matrix, interactions, (user_ids, item_ids), [NO_NEW_ITEM_LIMIT,
        _FEATURES_LIMIT], seed
    )  # fmt: skip


def from_sklearn(
    model: Any,
    user_items: Any,
    *,
    to: str | Path,
    user_ids: Any = None,
    item_ids: Any = None,
    user_vectors: Any = None,
    seed: int = 0,
) -> ImportReport:
    """Make a folder from scikit-learn's TruncatedSVD or NMF and the scipy matrix [users, items] that it was fitted on.

    Known users are scored as `inverse_transform(transform(user_items))` does. With TruncatedSVD an unknown user's
    vector is exact: the sum of the history's columns of `components_`. With NMF it is computed by mean or ridge,
    whichever has the higher held-out recall@20. `user_vectors`, if given, is the result of `fit_transform`. Raises
    SourceError for a model that was not fitted, or is of another class.
    """
    if getattr(model, "components_", None) is None:
        raise SourceError("the model has no components_: call fit before it is imported")
    is_svd = hasattr(model, "singular_values_") and not hasattr(model, "mean_")
    if not is_svd and not hasattr(model, "reconstruction_err_"):
        raise SourceError(
            f"{type(model).__name__} is neither TruncatedSVD nor NMF: give the vectors of both sides to from_vectors"
        )
    item_vectors = EntityVectors.of(item_ids, np.transpose(model.components_), "item")
    checked_user_ids = None if user_ids is None else checked_ids(user_ids, "user")
    clicks = ClickMatrix.of(user_items, checked_user_ids, item_vectors.entity_ids)
    if user_vectors is None:
        # The given matrix, not the clicks: the clicks lack weights below 0, which the model was fitted on.
        weights = user_items if sp.issparse(user_items) else clicks.matrix
        user_vectors = _call_model(lambda: model.transform(weights), "give the matrix that the model was fitted on")
    checked_user_vectors = EntityVectors.of(clicks.user_ids, user_vectors, "user")
    folds, limits = [], [NO_NEW_ITEM_LIMIT]
    if is_svd:
        projection_rows = item_vectors.vectors * np.float32(clicks.median_weight)
        folds.append(
            HistoryFold("the model's own projection", projection_rows, 0.0, None, np.zeros_like(projection_rows[0]))
        )
        if clicks.is_weighted:
            limits.append(
                f"weigh the clicks of an unknown user's history: each counts {clicks.median_weight:g}, the median"
            )
    model_title = f"scikit-learn {type(model).__name__}"
    return import_vectors(
        Path(to),
        item_vectors,
        checked_user_vectors,
        clicks,
        folds=folds,
        model_title=model_title,
        model_limit_texts=limits,
        seed=seed,
    )


def from_rectools(model: Any, dataset: Any, *, to: str | Path, seed: int = 0) -> ImportReport:
    """Make a folder from a fitted RecTools model that has vectors (ALS, BPR, LightFM, PureSVD, DSSM) and its Dataset.

    Ids are the external ones of the dataset. ALS without features computes an unknown user's vector as `from_implicit`
    does; all other models by mean or ridge, whichever has the higher held-out recall@20. DSSM ranks by Euclidean
    distance: its items become [vector, -length squared / 2], which an inner product ranks in the same order. Raises
    SourceError for other models.
    """
    model_name = type(model).__name__
    if not hasattr(model, "get_vectors"):
        raise SourceError(
            f"RecTools' {model_name} has no get_vectors: for EASE call from_item_weights with model.weight.T; other "
            "models without vectors cannot be imported"
        )
    wants_dataset = bool(inspect.signature(model.get_vectors).parameters)
    user_vectors, item_vectors = _call_model(
        lambda: model.get_vectors(dataset) if wants_dataset else model.get_vectors(),
        "call fit first, and give the dataset that it was fitted on",
    )
    clicks = dataset.get_user_item_matrix(include_weights=True)
    clicks.resize(len(user_vectors), len(item_vectors))  # users without a click have rows at the end, or no vector
    # Users and items without an interaction come last in both maps, and some models have no vectors for them.
    ids_by_side = tuple(
        id_map.external_ids[: len(side_vectors)]
        for id_map, side_vectors in ((dataset.user_id_map, user_vectors), (dataset.item_id_map, item_vectors))
    )
    inner_model = getattr(model, "model", None)
    has_features = dataset.user_features is not None or dataset.item_features is not None
    if getattr(inner_model, "alpha", None) is not None and not has_features:
        return from_implicit(inner_model, clicks, to=to, user_ids=ids_by_side[0], item_ids=ids_by_side[1], seed=seed)
    limits = [NO_NEW_ITEM_LIMIT, *([_FEATURES_LIMIT] if has_features else [])]
    distance_name = getattr(getattr(model, "u2i_dist", None), "name", "DOT")
    if distance_name == "EUCLIDEAN":
        item_vectors = np.asarray(item_vectors)
        user_vectors = np.column_stack([user_vectors, np.ones(len(user_vectors), np.float32)])
        item_vectors = np.column_stack([item_vectors, np.square(item_vectors, dtype=np.float64).sum(axis=1) / -2])
        limits.append("show distances: the order of a user's scores is right, their values mean nothing else")
    elif distance_name != "DOT":
        raise SourceError(f"{model_name} ranks by {distance_name}: give its vectors to from_vectors")
    return _import_vector_pair(
        to, f"RecTools {model_name}", user_vectors, item_vectors, clicks, ids_by_side, limits, seed
    )


def _als_fold(item_factors: NDArray[np.float32], regularization: float, click_confidence: float) -> HistoryFold:
    """Return the fold-in of ALS for implicit feedback, with the same confidence for every click."""
    factors_f8 = item_factors.astype(np.float64)
    eigenvalues, eigenvectors = np.linalg.eigh(factors_f8.T @ factors_f8 + regularization * np.eye(factors_f8.shape[1]))
    if eigenvalues[0] <= 0:
        raise SourceError(
            "the items' factors do not span all their dimensions, and regularization is 0: set it above 0"
        )
    inverse_root = (eigenvectors / np.sqrt(eigenvalues)) @ eigenvectors.T
    return HistoryFold(
        "the model's own equations",
        (factors_f8 @ inverse_root).astype(np.float32),
        click_confidence - 1.0,
        (click_confidence * inverse_root).astype(np.float32),
        np.zeros(factors_f8.shape[1], np.float32),
    )


def _attributes_of_implicit(model: Any) -> Mapping[str, Any]:
    attribute_by_name: dict[str, Any] = {name: getattr(model, name, None) for name in _IMPLICIT_ATTRIBUTES}
    copied_from_gpu = {
        name: attribute.to_numpy() for name, attribute in attribute_by_name.items() if hasattr(attribute, "to_numpy")
    }
    return attribute_by_name | copied_from_gpu


def _read_implicit_file(path: Path) -> Mapping[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in _IMPLICIT_ATTRIBUTES if name in file.files}
    except (OSError, ValueError, EOFError) as error:
        if "pickle" in str(error).lower():  # numpy's message recommends loading the file with pickle
            raise SourceError(
                f"{path} is pickled, and loading it would run any code in it: give the .npz file that `model.save` "
                "writes"
            ) from None
        raise SourceError(f"{path}: {error}; give the .npz file that `model.save` writes") from None


def _import_vector_pair(
    import_folder: str | Path,
    model_title: str,
    user_matrix: Any,
    item_matrix: Any,
    user_items: Any,
    ids_by_side: tuple[Any, ...],
    limit_texts: list[str],
    seed: int,
) -> ImportReport:
    """Check the vectors of users and items and write their folder; `ids_by_side` are the ids of users and of items."""
    user_vectors, item_vectors = (
        EntityVectors.of(ids_by_side[0], user_matrix, "user"),
        EntityVectors.of(ids_by_side[1], item_matrix, "item"),
    )
    clicks = ClickMatrix.of(user_items, user_vectors.entity_ids, item_vectors.entity_ids)
    return import_vectors(
        Path(import_folder), item_vectors, user_vectors, clicks, model_title=model_title,
        model_limit_texts=limit_texts, seed=seed
    )  # fmt: skip


def _call_model(call_model: Callable[[], Any], remedy: str) -> Any:
    """Call a model's method; raise SourceError for any exception, with its text in one line, and the remedy."""
    try:
        return call_model()
    except Exception as error:
        model_message = " ".join(str(error).split()).rstrip(".")
        raise SourceError(f"the model failed: {model_message}; {remedy}") from error
