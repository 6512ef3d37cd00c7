"""Recall and NDCG at 20, of the service's answers and of exact offline scores from the same bundle."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.tower import Histories, Tower
from infra.demo.checks import POLICY, InvariantViolation, Judge, Question
from infra.demo.synthetic import Features, Profiles
from precompute.bundles.bundle import Bundle, BundleModel
from serving.client import Client, Options
from serving.requests.answers import STORED_SOURCES

LIST_LENGTH = 20
TRIES_MAX = 10
Lists = Mapping[str, Sequence[str]]
Vectors = NDArray[np.float32]


def recall_and_ndcg(list_by_user: Lists, held_out_by_user: Lists, list_length: int = LIST_LENGTH) -> dict[str, float]:
    """Return mean recall (hits / held-out items) and NDCG with binary gain, whose ideal is min(top, held-out) hits."""
    gains = 1 / np.log2(np.arange(2, list_length + 2))
    recalls, ndcgs = [], []
    for user, held_out_items in held_out_by_user.items():
        if relevant_items := set(held_out_items):
            hit_ranks = [rank for rank, item in enumerate(list_by_user[user][:list_length]) if item in relevant_items]
            recalls.append(len(hit_ranks) / len(relevant_items))
            ndcgs.append(gains[hit_ranks].sum() / gains[: len(relevant_items)].sum())
    return {"recall": float(np.mean(recalls)), "NDCG": float(np.mean(ndcgs))}


def served_lists(service_url: str, users: Sequence[str], judge: Judge) -> dict[str, Sequence[str]]:
    """Look up the stored lists of `users` and judge them; repeat the lookup for users answered from another source.

    Raises Unanswered, or InvariantViolation if a user is still not answered from the night after TRIES_MAX lookups.
    """
    list_by_user: dict[str, Sequence[str]] = {}
    missing_users = list(users)
    with Client(service_url, policy=POLICY) as larder:
        for _ in range(TRIES_MAX):
            answers = larder.lookup_many("user_topk", missing_users, Options(LIST_LENGTH, deadline_ms=60_000))
            judge.request([Question("user_topk", user, LIST_LENGTH) for user in missing_users], answers)
            stored_answers = [answer for answer in answers if answer.source in STORED_SOURCES]
            list_by_user |= {str(answer.id): answer.items or () for answer in stored_answers}
            if not (missing_users := [user for user in users if user not in list_by_user]):
                return list_by_user
    raise InvariantViolation(f"{len(missing_users)} users are not answered from the night: {missing_users[0]}")


def offline_lists(
    bundle_folder: Path, histories: Lists, users: Sequence[str], profiles: Profiles | None = None
) -> dict[str, list[str]]:
    """Return each user's best items by float32 scores of the bundle's towers, computed in numpy, without the history.

    `profiles` are the features for towers that take some: items with features are ranked. Without profiles, the items
    of the bundle are ranked.
    """
    bundle = Bundle.read(bundle_folder)
    bundle_row_by_item = {raw.decode(): row for row, raw in enumerate(bundle.item_ids)}
    profiles = profiles or Profiles({}, {item: {} for item in bundle_row_by_item})
    column_by_item = {item: column for column, item in enumerate(profiles.items)}
    item_ids, item_rows = (list(column_by_item), [[bundle_row_by_item.get(item, -1)] for item in column_by_item])
    item_vectors = _run_tower(bundle.item_tower, item_rows, list(profiles.items.values()))
    user_rows = [[bundle_row_by_item[item] for item in histories[user] if item in bundle_row_by_item] for user in users]
    user_features = [profiles.users.get(user, {}) for user in users]
    list_by_user: dict[str, list[str]] = {}
    for user, vector in zip(users, _run_tower(bundle.user_tower, user_rows, user_features), strict=True):
        scores = item_vectors @ vector
        scores[[column_by_item[item] for item in histories[user] if item in column_by_item]] = -np.inf
        best_columns = np.argpartition(-scores, min(4 * LIST_LENGTH, len(item_ids) - 1))[: 4 * LIST_LENGTH]
        sorted_columns = best_columns[np.lexsort((best_columns, -scores[best_columns]))][:LIST_LENGTH]
        list_by_user[user] = [item_ids[column] for column in sorted_columns if scores[column] > -np.inf]
    return list_by_user


def _run_tower(model: BundleModel, index_rows: Sequence[Sequence[int]], features: Sequence[Features]) -> Vectors:
    """Run a tower on features and on `index_rows`: the model indices of each user's history, or of each item."""
    inputs: dict[str, Histories | NDArray[Any]] = {}
    for input_spec in model.spec.inputs:
        if input_spec.bind == "feature":
            inputs[input_spec.name] = np.array([values[str(input_spec.column)] for values in features], object)
        else:
            inputs[input_spec.name] = Histories.of(index_rows) if input_spec.bind == "history" else np.ravel(index_rows)
    return Tower.open(model.path, model.spec).run(inputs)
