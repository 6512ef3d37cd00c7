"""Import of models of item-to-item weights (EASE, SLIM, neighbourhoods): scores are a history times the weights B."""

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import svds

from cache.errors import SourceError
from cache.model.agreement import recalls
from precompute.adapters.fold_in import HISTORY_ITEMS_MAX, HistoryFold
from precompute.adapters.folder import ImportReport
from precompute.adapters.inputs import ClickMatrix, EntityVectors, checked_ids
from precompute.adapters.vectors import import_vectors
from precompute.bundles.held_out import RECALL_TOP_ITEMS

EXACT_ITEMS_MAX = 4096
"""Number of items up to which the weights are kept unchanged, with as many dimensions as items."""
DEFAULT_DIMS = 512
"""Default number of dimensions for more items."""
COMPARED_USERS_MAX = 256
"""Maximum number of users whose lists are compared with the exact ones."""


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

    Exact up to EXACT_ITEMS_MAX items: a user is the sum of unit vectors, an item its column of B. With more items, or
    with `dims`, B is truncated to that many singular values, and the report states the share of B that this keeps. All
    users are scored from a history, those of `clicks` (a scipy matrix [users, items] or a table, as in `from_vectors`),
    too; each click counts 1. Raises SourceError for weights that are not finite, not square, or not of these items.
    """
    checked_weights = _checked_weights(weights)
    item_texts = checked_ids(range(checked_weights.shape[0]) if item_ids is None else item_ids, "item")
    if len(item_texts) != checked_weights.shape[0]:
        raise SourceError(
            f"{len(item_texts):,} item ids, but weights of {checked_weights.shape[0]:,} items: give one id for each "
            "row, in the order of the rows"
        )
    click_matrix = ClickMatrix.of(clicks, None if user_ids is None else checked_ids(user_ids, "user"), item_texts)
    limit_texts = ["take in an item that it was not fitted on: it has no weights"]
    if click_matrix.is_weighted:
        limit_texts.append("weigh the clicks of a history: each counts 1")
    if np.diff(click_matrix.matrix.indptr).max() > HISTORY_ITEMS_MAX:
        limit_texts.append(f"use more than {HISTORY_ITEMS_MAX} items of a history")
    if dims is None and checked_weights.shape[0] <= EXACT_ITEMS_MAX:
        history_rows = np.eye(checked_weights.shape[0], dtype=np.float32)
        item_vectors = np.ascontiguousarray(
            (checked_weights.toarray() if sp.issparse(checked_weights) else checked_weights).T
        )
    else:
        history_rows, item_vectors, energy_share = _truncate_weights(
            checked_weights, DEFAULT_DIMS if dims is None else dims, seed
        )
        limit_texts.append(
            f"rank exactly as the weights do: {item_vectors.shape[1]} dimensions keep {energy_share:.1%} of their "
            "squared sum" + _overlap_in_words(checked_weights, history_rows, item_vectors, click_matrix, seed)
        )
    fold = HistoryFold("the sum of its items' rows", history_rows, 0.0, None, np.zeros_like(history_rows[0]))
    return import_vectors(
        Path(to), EntityVectors(item_texts, item_vectors), None, click_matrix, folds=[fold], model_title="item weights",
        model_limit_texts=limit_texts, seed=seed
    )  # fmt: skip


def ease(clicks: Any, regularization: float = 500.0) -> NDArray[np.float32]:
    """Compute the weights float32 [items, items] of EASE.

    From Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019. `clicks` is a scipy matrix [users,
    items]. Takes memory for three dense matrices float64 [items, items].
    """
    gram = (clicks.T @ clicks).toarray().astype(np.float64)
    gram[np.diag_indices_from(gram)] += regularization
    inverse_gram = np.linalg.inv(gram)
    weights: NDArray[np.float32] = (inverse_gram / -np.diag(inverse_gram)).astype(np.float32)
    np.fill_diagonal(weights, 0)
    return weights


def _checked_weights(weights: Any) -> Any:
    """Check weights and return them as float32, dense or CSR."""
    checked_weights = (
        sp.csr_matrix(weights, dtype=np.float32) if sp.issparse(weights) else np.asarray(weights, np.float32)
    )
    if (
        checked_weights.ndim != 2
        or checked_weights.shape[0] != checked_weights.shape[1]
        or not checked_weights.shape[0]
    ):
        raise SourceError(
            "item weights must be a square matrix with a row and a column for each item, not "
            f"{list(checked_weights.shape)}"
        )
    if not np.isfinite(checked_weights.data if sp.issparse(checked_weights) else checked_weights).all():
        raise SourceError("the item weights are not all finite: set unknown weights to 0")
    return checked_weights


def _truncate_weights(weights: Any, dims: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Return (rows [items, dims] that a history sums, vectors [items, dims], kept share of the squared weights)."""
    if not 0 < dims < weights.shape[0]:
        raise SourceError(f"dims must be 1 to {weights.shape[0] - 1:,}, fewer than the items, not {dims}")
    start_vector = np.random.default_rng(seed).standard_normal(weights.shape[0])
    left_vectors, singular_values, right_vectors = svds(weights.astype(np.float64), k=dims, v0=start_vector)
    root_values = np.sqrt(singular_values)
    total_energy = float(np.square(weights.data if sp.issparse(weights) else weights, dtype="f8").sum())
    energy_share = float(np.square(singular_values).sum()) / (total_energy or 1.0)
    return (
        (left_vectors * root_values).astype(np.float32),
        (right_vectors.T * root_values).astype(np.float32),
        energy_share,
    )


def _overlap_in_words(
    weights: Any, history_rows: NDArray[np.float32], item_vectors: NDArray[np.float32], clicks: ClickMatrix, seed: int
) -> str:
    """Describe the agreement of lists by the truncated weights with the exact ones; empty without clicks."""
    sampled_users = clicks.sample_users(COMPARED_USERS_MAX, 1, np.random.default_rng(seed))
    if not len(sampled_users):
        return ""
    history_matrix = (clicks.matrix[sampled_users] > 0).astype(np.float32)
    exact_scores = history_matrix @ weights
    top_lists = []
    for scores in (
        exact_scores.toarray() if sp.issparse(exact_scores) else exact_scores,
        history_matrix @ history_rows @ item_vectors.T,
    ):
        scores[history_matrix.nonzero()] = -np.inf
        top_start = max(0, scores.shape[1] - RECALL_TOP_ITEMS)
        top_lists.append(np.argpartition(scores, top_start, axis=1)[:, top_start:])
    mean_recall = float(recalls(top_lists[0], top_lists[1]).mean())
    return f", and lists of {len(sampled_users)} users share {mean_recall:.3f} of the exact top {RECALL_TOP_ITEMS}"
