"""From vectors of items, and of users if there are any, to a folder that a night reads."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.model.ranking import Metric
from precompute.adapters.fold_in import (
    Fold,
    as_by_chance,
    check_taste,
    choose,
    ridges,
    share_by_chance,
    too_few_clicks,
    unjudged_ids,
)
from precompute.adapters.folder import Imported, ImportReport, write_folder
from precompute.adapters.inputs import ClickMatrix, Vectors, ids_of
from precompute.bundles.bundle import ModelFile

NO_NEW_ITEM = "take in an item that it was not fitted on: it has no vector"
"""Limit of every model whose items have a vector each."""


def from_vectors(
    item_ids: Any,
    item_vectors: Any,
    user_ids: Any = None,
    user_vectors: Any = None,
    *,
    to: str | Path,
    clicks: Any = None,
    metric: Metric = "inner_product",
    seed: int = 0,
) -> ImportReport:
    """Make a folder of vectors [items, dims] and [users, dims] (float32; or .npy or Parquet files), ids in their order.

    `clicks`, a scipy matrix [users, items], its .npz file, or a Parquet or CSV file with the columns `user` and `item`,
    is what users did. It is left out of their lists, and decides how a stranger's history becomes a vector: mean or
    ridge against the items, by held-out recall@20. Without `user_vectors` its users are scored in this way, too. Raises
    SourceError, naming what is wrong and the remedy; nothing is written then.
    """
    items = Vectors.of(item_ids, item_vectors, "item")
    users = None if user_vectors is None else Vectors.of(user_ids, user_vectors, "user")
    known_user_ids = (
        users.ids if users is not None else None if user_ids is None else ids_of(user_ids, "user")
    )
    click_matrix = None if clicks is None else ClickMatrix.of(clicks, known_user_ids, items.ids)
    return import_vectors(Path(to), items, users, click_matrix, metric=metric, seed=seed)


def import_vectors(
    to: Path,
    items: Vectors,
    users: Vectors | None,
    clicks: ClickMatrix | None,
    *,
    folds: Sequence[Fold] = (),
    metric: Metric = "inner_product",
    model: str = "vectors",
    cannot: Sequence[str] = (),
    seed: int = 0,
    item_tower: ModelFile | None = None,
    features: Mapping[str, Any] | None = None,
    further_columns: tuple[str, ...] = (),
    unused_columns: tuple[str, ...] = (),
) -> ImportReport:
    """Make a folder of checked vectors and clicks; the report lists the columns, other arguments are as in `model_of`.

    Raises SourceError where users' vectors rank what they clicked no better than any other item.
    """
    started_at = time.perf_counter()
    imported = model_of(
        items, users, clicks, folds=folds, metric=metric, model=model, cannot=cannot, seed=seed, item_tower=item_tower,
        features=features,
    )  # fmt: skip
    if imported.share_by_chance is not None:
        raise as_by_chance(imported.share_by_chance)
    limits = imported.cannot
    if users is not None and clicks is not None:
        users_with_clicks = np.count_nonzero(np.diff(clicks.matrix.indptr))
        if unjudged := too_few_clicks(int(users_with_clicks), int(clicks.matrix.nnz)):
            limits += (unjudged_ids(unjudged),)
    if users is None and clicks is not None:
        limits += _doubts(imported, clicks, seed)
    completed = replace(
        imported, cannot=limits, further_columns=further_columns, unused_columns=unused_columns
    )
    return write_folder(to, completed, started_at)


def _doubts(imported: Imported, clicks: ClickMatrix, seed: int) -> tuple[str, ...]:
    """Return the limit of items' vectors that rank held-out clicks by chance, or that clicks cannot judge.

    They are not refused: vectors of texts or images need not be what users choose by.
    """
    try:
        taste = check_taste(
            imported.user_tower, imported.user_spec, imported.items.rows, clicks, imported.metric,
            np.random.default_rng(seed),
        )  # fmt: skip
    except SourceError as error:
        share: Any = error.details["share"]
        limit = (
            f"recommend better than by chance: what users clicked scores above a random item in {share:.0%} of pairs; "
            "if the vectors were fitted on such clicks, item ids are not in the order of their rows"
        )
        return (limit,)
    return (unjudged_ids(taste.unjudged),) if taste.unjudged else ()


def model_of(
    items: Vectors,
    users: Vectors | None,
    clicks: ClickMatrix | None,
    *,
    folds: Sequence[Fold] = (),
    metric: Metric = "inner_product",
    model: str = "vectors",
    cannot: Sequence[str] = (),
    seed: int = 0,
    item_tower: ModelFile | None = None,
    features: Mapping[str, Any] | None = None,
) -> Imported:
    """The model that checked vectors and clicks make, its way of folding a history in chosen by the clicks.

    `folds` are tried instead of mean and ridges, if there are any. `item_tower` is what gave the items' vectors, if it
    takes more than their index; `features` go beside it.
    """
    rng = np.random.default_rng(seed)
    if metric not in ("inner_product", "cosine"):
        raise SourceError(f"metric is inner_product or cosine, not {metric!r}")
    if users is not None and users.dims != items.dims:
        raise SourceError(
            f"users' vectors have {users.dims} numbers, items' {items.dims}: give both of one fitted model"
        )
    chance_auc = None
    if users is not None and clicks is not None:
        chance_auc = share_by_chance(items.rows, users.rows, clicks, rng)
    tried = folds or _folds(items.rows, None if users is None else users.rows, clicks, rng)
    winning_fold = choose(tried, items.rows, clicks, metric, rng)
    limits = list(cannot)
    if clicks is None and users is None:
        limits.append(
            "have a night yet: it knows no users; name what they did in [sources] interactions of larder.toml, or "
            "their vectors in user_vectors"
        )
    elif clicks is None:
        limits.append(
            "leave out of lists what users chose before, nor judge by what they choose next: there are no clicks"
        )
    return Imported(
        model, items, winning_fold.tower, winning_fold.spec, metric, winning_fold.name, winning_fold.recalls,
        users, clicks, tuple(limits),
        item_tower, features or {}, chance_auc,
    )  # fmt: skip


def _folds(
    items: NDArray[np.float32],
    users: NDArray[np.float32] | None,
    clicks: ClickMatrix | None,
    rng: np.random.Generator,
) -> list[Fold]:
    """Mean and ridges, in the space that users and items share.

    A column that is one number for every user (1) holds the items' biases: it is every stranger's, too. One that is one
    number for every item holds the users' and ranks nothing.
    """
    rows, offset, target = items.copy(), np.zeros(items.shape[1], np.float32), 1.0
    if users is not None:
        biases = (users == users[0]).all(axis=0) & (users[0] != 0) & (len(users) > 1)
        offset[biases] = users[0, biases]
        rows[:, biases] = 0
        rows[:, (items == items[0]).all(axis=0) & (len(items) > 1)] = 0
        if clicks is not None and clicks.matrix.nnz:
            pairs = clicks.matrix.tocoo()
            sampled_pairs = rng.choice(pairs.nnz, min(pairs.nnz, 20_000), replace=False)
            scores = np.einsum(
                "ij,ij->i", users[pairs.row[sampled_pairs]], rows[pairs.col[sampled_pairs]]
            )
            target = max(float(np.median(scores)), 1e-6)
    return ridges(rows, offset, target)
