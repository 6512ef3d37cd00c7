"""Import of models that weigh items by items (EASE, SLIM, neighbourhoods): a history x scores x B."""

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import svds

from cache.errors import SourceError
from cache.model.agreement import recalls
from precompute.adapters.fold_in import HISTORY_MAX, Fold
from precompute.adapters.folder import ImportReport
from precompute.adapters.inputs import ClickMatrix, Vectors, ids_of
from precompute.adapters.vectors import import_vectors
from precompute.bundles.held_out import TOP

EXACT_MAX = 4096
"""Items up to which the weights are kept unchanged, with as many dimensions as items."""
DIMS = 512
"""Default number of dimensions for more items."""
COMPARED = 256
"""Users whose lists are compared with the exact ones."""


def from_item_weights(
    weights: Any,
    clicks: Any,
    *,
    to: str | Path,
    user_ids: Any = None,
    item_ids: Any = None,
    dims: int | None = None,
    seed: int = 0,
) -> ImportReport:
    """Make a folder of weights B [items, items] (dense or scipy): item j scores the sum of B[i, j] over a history's i.

    Exact up to EXACT_MAX items: a user is the sum of unit vectors, an item its column of B. Beyond, or with `dims`, B
    is cut to that many singular values, and the report says how much that keeps. Everybody is scored from a history,
    the users of `clicks` (a scipy matrix [users, items] or a table, as in `from_vectors`), too; a click counts 1.
    Raises SourceError for weights that are not finite, not square, or not of these items.
    """
    checked_weights = _checked(weights)
    names = ids_of(range(checked_weights.shape[0]) if item_ids is None else item_ids, "item")
    if len(names) != checked_weights.shape[0]:
        raise SourceError(
            f"{len(names):,} item ids, but weights of {checked_weights.shape[0]:,} items: give one id for each row, in "
            "its order"
        )
    of_clicks = ClickMatrix.of(
        clicks, None if user_ids is None else ids_of(user_ids, "user"), names
    )
    limits = ["take in an item that it was not fitted on: it has no weights"]
    if of_clicks.is_weighted:
        limits.append("weigh the clicks of a history: each counts 1")
    if np.diff(of_clicks.matrix.indptr).max() > HISTORY_MAX:
        limits.append(f"use more than {HISTORY_MAX} items of a history")
    if dims is None and checked_weights.shape[0] <= EXACT_MAX:
        rows = np.eye(checked_weights.shape[0], dtype=np.float32)
        items = np.ascontiguousarray(
            (checked_weights.toarray() if sp.issparse(checked_weights) else checked_weights).T
        )
    else:
        rows, items, energy_share = _cut(checked_weights, DIMS if dims is None else dims, seed)
        limits.append(
            f"rank quite as the weights do: {items.shape[1]} dimensions keep {energy_share:.1%} of their energy"
            + _overlap(checked_weights, rows, items, of_clicks, seed)
        )
    fold = Fold("the sum of its items' rows", rows, 0.0, None, np.zeros_like(rows[0]))
    return import_vectors(
        Path(to), Vectors(names, items), None, of_clicks, folds=[fold], model="item weights", cannot=limits, seed=seed
    )  # fmt: skip


def ease(clicks: Any, regularization: float = 500.0) -> NDArray[np.float32]:
    """Weights float32 [items, items] of EASE (Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019).

    `clicks` is a scipy matrix [users, items]. Takes memory for three dense matrices float64 [items, items].
    """
    gram = (clicks.T @ clicks).toarray().astype(np.float64)
    gram[np.diag_indices_from(gram)] += regularization
    inverse = np.linalg.inv(gram)
    weights: NDArray[np.float32] = (inverse / -np.diag(inverse)).astype(np.float32)
    np.fill_diagonal(weights, 0)
    return weights


def _checked(weights: Any) -> Any:
    """Check weights and return them as float32, dense or CSR."""
    checked_weights = (
        sp.csr_matrix(weights, dtype=np.float32)
        if sp.issparse(weights)
        else np.asarray(weights, np.float32)
    )
    if (
        checked_weights.ndim != 2
        or checked_weights.shape[0] != checked_weights.shape[1]
        or not checked_weights.shape[0]
    ):
        raise SourceError(
            f"item weights are a square matrix, a row and a column for each item, not {list(checked_weights.shape)}"
        )
    if not np.isfinite(
        checked_weights.data if sp.issparse(checked_weights) else checked_weights
    ).all():
        raise SourceError("the item weights are not all finite numbers: set what is unknown to 0")
    return checked_weights


def _cut(
    weights: Any, dims: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Return (rows [items, dims] that a history sums, vectors [items, dims], share of the squared weights kept)."""
    if not 0 < dims < weights.shape[0]:
        raise SourceError(
            f"dims is 1 to {weights.shape[0] - 1:,}, fewer than there are items, not {dims}"
        )
    start = np.random.default_rng(seed).standard_normal(weights.shape[0])
    left_vectors, values, right = svds(weights.astype(np.float64), k=dims, v0=start)
    root = np.sqrt(values)
    energy = float(np.square(weights.data if sp.issparse(weights) else weights, dtype="f8").sum())
    energy_share = float(np.square(values).sum()) / (energy or 1.0)
    return (
        (left_vectors * root).astype(np.float32),
        (right.T * root).astype(np.float32),
        energy_share,
    )


def _overlap(
    weights: Any,
    rows: NDArray[np.float32],
    items: NDArray[np.float32],
    clicks: ClickMatrix,
    seed: int,
) -> str:
    """Describe for the report how far lists by the cut weights agree with the exact ones; empty without clicks."""
    sampled_users = clicks.sample(COMPARED, 1, np.random.default_rng(seed))
    if not len(sampled_users):
        return ""
    history = (clicks.matrix[sampled_users] > 0).astype(np.float32)
    exact = history @ weights
    lists = []
    for scores in (exact.toarray() if sp.issparse(exact) else exact, history @ rows @ items.T):
        scores[history.nonzero()] = -np.inf
        top_start = max(0, scores.shape[1] - TOP)
        lists.append(np.argpartition(scores, top_start, axis=1)[:, top_start:])
    mean_recall = float(recalls(lists[0], lists[1]).mean())
    return (
        f", and lists of {len(sampled_users)} users share {mean_recall:.3f} of the exact top {TOP}"
    )
