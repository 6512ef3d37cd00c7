"""Recall and NDCG at 20, of the service's answers, and of exact scores by the same bundle."""

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

TOP = 20
TRIES = 10
Lists = Mapping[str, Sequence[str]]


def quality(lists: Lists, held_out: Lists, top: int = TOP) -> dict[str, float]:
    """Return mean recall = hits / held-out items, and NDCG with binary gain, ideal = min(top, held-out items) hits."""
    gains = 1 / np.log2(np.arange(2, top + 2))
    recalls, ndcgs = [], []
    for user, held_out_items in held_out.items():
        if relevant := set(held_out_items):
            hits = [rank for rank, item in enumerate(lists[user][:top]) if item in relevant]
            recalls.append(len(hits) / len(relevant))
            ndcgs.append(gains[hits].sum() / gains[: len(relevant)].sum())
    return {"recall": float(np.mean(recalls)), "NDCG": float(np.mean(ndcgs))}


def served_lists(url: str, users: Sequence[str], judge: Judge) -> dict[str, Sequence[str]]:
    """Read the nightly lists of `users`, each judged; users who are answered from elsewhere are asked again.

    Raises Unanswered, and InvariantViolation for users who are not answered from the night.
    """
    lists: dict[str, Sequence[str]] = {}
    missing = list(users)
    with Client(url, policy=POLICY) as larder:
        for _ in range(TRIES):
            answers = larder.lookup_many("user_topk", missing, Options(TOP, deadline_ms=60_000))
            judge.request([Question("user_topk", user, TOP) for user in missing], answers)
            stored = [answer for answer in answers if answer.source in STORED_SOURCES]
            lists |= {str(answer.id): answer.items or () for answer in stored}
            if not (missing := [user for user in users if user not in lists]):
                return lists
    raise InvariantViolation(f"{len(missing)} users are not answered from the night: {missing[0]}")


def offline_lists(
    bundle_folder: Path, histories: Lists, users: Sequence[str], profiles: Profiles | None = None
) -> dict[str, list[str]]:
    """Rank by exact float32 scores of the bundle's own towers in plain numpy, without the history.

    `profiles` are for towers that take features; the items are then those that have some, else the bundle's.
    """
    bundle = Bundle.read(bundle_folder)
    index = {raw.decode(): row for row, raw in enumerate(bundle.item_ids)}
    profiles = profiles or Profiles({}, {item: {} for item in index})
    columns = {item: column for column, item in enumerate(profiles.items)}
    ids, item_rows = list(columns), [[index.get(item, -1)] for item in columns]
    items = _vectors(bundle.item_tower, item_rows, list(profiles.items.values()))
    user_rows = [[index[item] for item in histories[user] if item in index] for user in users]
    features = [profiles.users.get(user, {}) for user in users]
    lists: dict[str, list[str]] = {}
    for user, vector in zip(users, _vectors(bundle.user_tower, user_rows, features), strict=True):
        scores = items @ vector
        scores[[columns[item] for item in histories[user] if item in columns]] = -np.inf
        best = np.argpartition(-scores, min(4 * TOP, len(ids) - 1))[: 4 * TOP]
        order = best[np.lexsort((best, -scores[best]))][:TOP]
        lists[user] = [ids[column] for column in order if scores[column] > -np.inf]
    return lists


def _vectors(
    model: BundleModel, rows: Sequence[Sequence[int]], features: Sequence[Features]
) -> NDArray[np.float32]:
    """Run a tower on histories, or items' own indices, in `rows`, and on features."""
    inputs: dict[str, Histories | NDArray[Any]] = {}
    for spec in model.spec.inputs:
        if spec.bind == "feature":
            values = [entity_features[str(spec.column)] for entity_features in features]
            inputs[spec.name] = np.array(values, object)
        else:
            inputs[spec.name] = Histories.of(rows) if spec.bind == "history" else np.ravel(rows)
    return Tower.open(model.path, model.spec).run(inputs)
