"""Reads the files of an import, and a small world to import from."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.tower import Histories, Tower
from cache.topk.topk import Scorer
from precompute.bundles.bundle import Bundle


def taste_clicks(users: int = 120, items: int = 80, *, seed: int = 0) -> sp.csr_matrix:
    """Return clicks of users who have 8 to 20 items each, mostly of their own group."""
    rng = np.random.default_rng(seed)
    rows, columns = [], []
    for user in range(users):
        weight = np.where(np.arange(items) % 4 == user % 4, 10.0, 1.0)
        count = int(rng.integers(8, 20))
        columns.append(rng.choice(items, count, replace=False, p=weight / weight.sum()))
        rows.append(np.full(count, user))
    column, row = np.concatenate(columns), np.concatenate(rows)
    return sp.csr_matrix((np.ones(len(row), np.float32), (row, column)), (users, items))


def histories_of(clicks: sp.csr_matrix) -> Histories:
    """Return the items of each row, ascending."""
    sorted_clicks = clicks.sorted_indices()
    return Histories(sorted_clicks.indptr.astype(np.int64), sorted_clicks.indices.astype(np.int64))


def item_vectors(folder: Path) -> NDArray[np.float32]:
    """Return the vectors of all items, by the item tower."""
    bundle = Bundle.open(folder / "bundle")
    model = bundle.item_tower
    return Tower.open(model.path, model.spec).run({"item_index": np.arange(len(bundle.vocabulary))})


def folded(folder: Path, histories: Histories) -> NDArray[np.float32]:
    """Return the vectors of histories, by the user tower."""
    model = Bundle.open(folder / "bundle").user_tower
    return Tower.open(model.path, model.spec).run({"history": histories})


def user_vectors(folder: Path) -> NDArray[np.float32]:
    """Return the vectors of known users."""
    column = pq.read_table(folder / "user_vectors.parquet").column("vector").combine_chunks()
    flat: NDArray[np.float32] = column.flatten().to_numpy()
    return flat.reshape(len(column), -1)


def lists(folder: Path, users: NDArray[np.float32], excluded_histories: Histories, k: int) -> NDArray[np.uint32]:
    """Return the best k items of each user without the history, as a night scores them."""
    return Scorer.of(item_vectors(folder)).top(users, k, excluded_histories)[0]


def ranking(scores: NDArray[np.floating], excluded_histories: Histories, k: int) -> NDArray[np.int64]:
    """Return the best k items of each row of scores without the history, as a library would list them."""
    remaining_scores = np.array(scores, np.float64)
    for row in range(len(remaining_scores)):
        remaining_scores[
            row, excluded_histories.indices[excluded_histories.indptr[row] : excluded_histories.indptr[row + 1]]
        ] = -np.inf
    return np.argsort(-remaining_scores, axis=1, kind="stable")[:, :k]
