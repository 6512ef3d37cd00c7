"""Import of vectors of items, and of users if given, into a folder that a night reads."""

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
    HistoryFold,
    chance_error,
    check_user_tower,
    choose_fold,
    mean_and_ridge_folds,
    share_if_by_chance,
    too_few_clicks_reason,
    unjudged_ids_limit,
)
from precompute.adapters.folder import ImportedModel, ImportReport, write_folder
from precompute.adapters.inputs import ClickMatrix, EntityVectors, checked_ids
from precompute.bundles.bundle import ModelFile

NO_NEW_ITEM_LIMIT = "take in an item that it was not fitted on: it has no vector"
"""Limit of every model with one vector for each item."""


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
    """Make a folder of vectors [items, dims] and [users, dims] (float32; or .npy or Parquet files), ids in row order.

    `clicks` are a scipy matrix [users, items], its .npz file, or a Parquet or CSV file with the columns `user` and
    `item`. Clicked items are left out of users' lists. Clicks also decide how an unknown user's history becomes a
    vector: by the mean of its items or by ridge regression, whichever has the higher held-out recall@20. Without
    `user_vectors` the users of the clicks are scored in this way, too. Raises SourceError, naming the cause and the
    remedy, and writes nothing then.
    """
    checked_item_vectors = EntityVectors.of(item_ids, item_vectors, "item")
    checked_user_vectors = None if user_vectors is None else EntityVectors.of(user_ids, user_vectors, "user")
    known_user_ids = (
        checked_user_vectors.entity_ids
        if checked_user_vectors is not None
        else None
        if user_ids is None
        else checked_ids(user_ids, "user")
    )
    click_matrix = None if clicks is None else ClickMatrix.of(clicks, known_user_ids, checked_item_vectors.entity_ids)
    return import_vectors(Path(to), checked_item_vectors, checked_user_vectors, click_matrix, metric=metric, seed=seed)


def import_vectors(
    import_folder: Path,
    item_vectors: EntityVectors,
    user_vectors: EntityVectors | None,
    clicks: ClickMatrix | None,
    *,
    folds: Sequence[HistoryFold] = (),
    metric: Metric = "inner_product",
    model_title: str = "vectors",
    model_limit_texts: Sequence[str] = (),
    seed: int = 0,
    item_tower: ModelFile | None = None,
    feature_table_by_setting: Mapping[str, Any] | None = None,
    further_columns: tuple[str, ...] = (),
    unused_columns: tuple[str, ...] = (),
) -> ImportReport:
    """Make a folder of checked vectors and clicks; `further_columns` and `unused_columns` are for the report.

    Other arguments are those of `fold_vectors_model`. Raises SourceError if users' vectors rank clicked items no better
    than any other item.
    """
    started_at = time.perf_counter()
    imported = fold_vectors_model(
        item_vectors, user_vectors, clicks, folds=folds, metric=metric, model_title=model_title,
        model_limit_texts=model_limit_texts, seed=seed,
        item_tower=item_tower,
        feature_table_by_setting=feature_table_by_setting,
    )  # fmt: skip
    if imported.share_by_chance is not None:
        raise chance_error(imported.share_by_chance)
    limit_texts = imported.limit_texts
    if user_vectors is not None and clicks is not None:
        users_with_clicks = np.count_nonzero(np.diff(clicks.matrix.indptr))
        if unjudged_reason := too_few_clicks_reason(int(users_with_clicks), int(clicks.matrix.nnz)):
            limit_texts += (unjudged_ids_limit(unjudged_reason),)
    if user_vectors is None and clicks is not None:
        limit_texts += _chance_limits(imported, clicks, seed)
    completed_import = replace(
        imported, limit_texts=limit_texts, further_columns=further_columns, unused_columns=unused_columns
    )
    return write_folder(import_folder, completed_import, started_at)


def _chance_limits(imported: ImportedModel, clicks: ClickMatrix, seed: int) -> tuple[str, ...]:
    """Return a limit if items' vectors rank held-out clicks by chance, or if clicks cannot judge that.

    Such vectors are not refused: users need not choose by what the vectors of texts or images express.
    """
    try:
        tower_check = check_user_tower(
            imported.user_tower, imported.user_spec, imported.items.vectors, clicks, imported.metric,
            np.random.default_rng(seed),
        )  # fmt: skip
    except SourceError as error:
        chance_share: Any = error.details["share"]
        limit = (
            f"recommend better than by chance: clicked items score above a random item in {chance_share:.0%} of pairs; "
            "if the vectors were fitted on such clicks, item ids are not in the order of their rows"
        )
        return (limit,)
    return (unjudged_ids_limit(tower_check.unjudged_reason),) if tower_check.unjudged_reason else ()


def fold_vectors_model(
    item_vectors: EntityVectors,
    user_vectors: EntityVectors | None,
    clicks: ClickMatrix | None,
    *,
    folds: Sequence[HistoryFold] = (),
    metric: Metric = "inner_product",
    model_title: str = "vectors",
    model_limit_texts: Sequence[str] = (),
    seed: int = 0,
    item_tower: ModelFile | None = None,
    feature_table_by_setting: Mapping[str, Any] | None = None,
) -> ImportedModel:
    """Return the model of checked vectors and clicks; the fold of histories is chosen by the clicks.

    `folds`, if any, are the candidates instead of mean and ridges. `item_tower` made the items' vectors, if it takes
    more than their index; `feature_table_by_setting` are its inputs.
    """
    rng = np.random.default_rng(seed)
    if metric not in ("inner_product", "cosine"):
        raise SourceError(f"metric must be inner_product or cosine, not {metric!r}")
    if user_vectors is not None and user_vectors.dims != item_vectors.dims:
        raise SourceError(
            f"users' vectors have {user_vectors.dims} numbers, items' {item_vectors.dims}: give both vectors of the "
            "same fitted model"
        )
    chance_auc = None
    if user_vectors is not None and clicks is not None:
        chance_auc = share_if_by_chance(item_vectors.vectors, user_vectors.vectors, clicks, rng)
    tried_folds = folds or _candidate_folds(
        item_vectors.vectors, None if user_vectors is None else user_vectors.vectors, clicks, rng
    )
    winning_fold = choose_fold(tried_folds, item_vectors.vectors, clicks, metric, rng)
    limit_texts = list(model_limit_texts)
    if clicks is None and user_vectors is None:
        limit_texts.append(
            "have a night yet: it has no users; name files of interactions in [sources] interactions of larder.toml, "
            "or give user_vectors"
        )
    elif clicks is None:
        limit_texts.append(
            "leave items out that users chose before, nor judge lists by later choices: there are no clicks"
        )
    return ImportedModel(
        model_title, item_vectors, winning_fold.tower, winning_fold.spec, metric, winning_fold.fold_name,
        winning_fold.recall_by_fold,
        user_vectors, clicks, tuple(limit_texts),
        item_tower, feature_table_by_setting or {}, chance_auc,
    )  # fmt: skip


def _candidate_folds(
    item_matrix: NDArray[np.float32],
    user_matrix: NDArray[np.float32] | None,
    clicks: ClickMatrix | None,
    rng: np.random.Generator,
) -> list[HistoryFold]:
    """Return mean and ridge folds in the space that users and items share.

    A column with the same number other than 0 for every user multiplies the items' biases: an unknown user gets that
    number, too. A column with the same number for every item holds the users' biases, which do not rank items.
    """
    fold_rows, offset, target_score = (item_matrix.copy(), np.zeros(item_matrix.shape[1], np.float32), 1.0)
    if user_matrix is not None:
        is_bias_column = (user_matrix == user_matrix[0]).all(axis=0) & (user_matrix[0] != 0) & (len(user_matrix) > 1)
        offset[is_bias_column] = user_matrix[0, is_bias_column]
        fold_rows[:, is_bias_column] = 0
        fold_rows[:, (item_matrix == item_matrix[0]).all(axis=0) & (len(item_matrix) > 1)] = 0
        if clicks is not None and clicks.matrix.nnz:
            click_pairs = clicks.matrix.tocoo()
            sampled_pairs = rng.choice(click_pairs.nnz, min(click_pairs.nnz, 20_000), replace=False)
            scores = np.einsum(
                "ij,ij->i", user_matrix[click_pairs.row[sampled_pairs]], fold_rows[click_pairs.col[sampled_pairs]]
            )
            target_score = max(float(np.median(scores)), 1e-6)
    return mean_and_ridge_folds(fold_rows, offset, target_score)
