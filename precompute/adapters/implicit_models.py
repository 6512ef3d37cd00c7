"""Models of the library implicit: ALS with its own fold-in, BPR and logistic matrix factorisation.

The fitted attributes are read, or the .npz file that `model.save` writes; implicit itself need not be installed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.adapters.folder import ImportReport
from precompute.adapters.given import ClickMatrix, Vectors
from precompute.adapters.towers import Fold
from precompute.adapters.vectors import NO_NEW_ITEM, import_vectors

_NAMES = ("user_factors", "item_factors", "regularization", "alpha")


def from_implicit(
    model: Any,
    user_items: Any,
    *,
    to: str | Path,
    user_ids: Any = None,
    item_ids: Any = None,
    seed: int = 0,
) -> ImportReport:
    """Make a folder of a fitted model of implicit (or the .npz file of one) and the matrix that it was fitted on.

    Ids are in the order of the matrix' rows and columns (default: their numbers). Known users are scored from their
    factors, exactly as `recommend(filter_already_liked_items=True)` does; a stranger's history is folded into ALS as
    `recalculate_user` would, by the usual confidence of a click. Raises SourceError for a model that was not fitted.
    """
    parts = _saved(Path(model)) if isinstance(model, str | Path) else _attributes(model)
    users, items = parts.get("user_factors"), parts.get("item_factors")
    if users is None or items is None or not np.size(users) or not np.size(items):
        model_name = model if isinstance(model, str | Path) else type(model).__name__
        raise SourceError(f"{model_name} has no factors: call fit before it is imported")
    name = "implicit" if isinstance(model, str | Path) else f"implicit {type(model).__name__}"
    of_items, of_users = Vectors.of(item_ids, items, "item"), Vectors.of(user_ids, users, "user")
    clicks = ClickMatrix.of(user_items, of_users.ids, of_items.ids)
    folds, limits = [], [NO_NEW_ITEM]
    if parts.get("alpha") is not None:  # only ALS has confidences
        confidence = float(parts["alpha"]) * clicks.usual_weight
        folds.append(_als(of_items.rows, float(parts["regularization"]), confidence))
        if clicks.is_weighted:
            limits.append(
                f"weigh the clicks of a stranger's history: each counts {confidence:g}, alpha times the median weight"
            )
    return import_vectors(
        Path(to), of_items, of_users, clicks, folds=folds, model=name, cannot=limits, seed=seed
    )


def _als(items: NDArray[np.float32], regularization: float, confidence: float) -> Fold:
    """Fold of ALS for implicit feedback, with one confidence for every click."""
    wide = items.astype(np.float64)
    values, vectors = np.linalg.eigh(wide.T @ wide + regularization * np.eye(wide.shape[1]))
    if values[0] <= 0:
        raise SourceError(
            "the items' factors span less than their dimensions, and regularization is 0: set it above 0"
        )
    root = (vectors / np.sqrt(values)) @ vectors.T
    return Fold(
        "the model's own equations",
        (wide @ root).astype(np.float32),
        confidence - 1.0,
        (confidence * root).astype(np.float32),
        np.zeros(wide.shape[1], np.float32),
    )


def _attributes(model: Any) -> Mapping[str, Any]:
    attribute_by_name: dict[str, Any] = {name: getattr(model, name, None) for name in _NAMES}
    on_gpu = {
        name: attribute.to_numpy()
        for name, attribute in attribute_by_name.items()
        if hasattr(attribute, "to_numpy")
    }
    return attribute_by_name | on_gpu


def _saved(path: Path) -> Mapping[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in _NAMES if name in file.files}
    except (OSError, ValueError, EOFError) as error:
        if "pickle" in str(error).lower():  # numpy says how it would be read all the same
            raise SourceError(
                f"{path} is pickled, and would run whatever code is in it: give the .npz file that `model.save` writes"
            ) from None
        raise SourceError(f"{path}: {error}; give the .npz file that `model.save` writes") from None
