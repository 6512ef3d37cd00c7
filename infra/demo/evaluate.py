"""Recall and NDCG at 20, of the service's answers, and of the same bundle computed without Larder."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.model.runtime import ort
from infra.demo.synthetic import Features, Profiles
from serving.client import Answer, AsyncClient, Options, Policy
from serving.requests.answers import STORED_SOURCES

TOP = 20
BATCH = 1000
TRIES = 10
DEADLINE_MS = 5_000
_PADDED_NUMBERS = 1 << 23
_BATCH_ROWS = 512
_BLOCK = 64

Lists = Mapping[str, Sequence[str]]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class RankingQuality:
    """Mean recall and NDCG over the users with held-out items."""

    recall: float
    ndcg: float
    users: int

    def agrees_with(self, reference: "RankingQuality", tolerance: float = 5e-5) -> bool:
        """True if equal to four decimals: items whose scores tie may come in another order elsewhere."""
        return (
            self.users == reference.users
            and abs(self.recall - reference.recall) <= tolerance
            and abs(self.ndcg - reference.ndcg) <= tolerance
        )


def quality(lists: Lists, held_out: Lists, top: int = TOP) -> RankingQuality:
    """Compute recall = hits / held-out items, and NDCG with binary gain, ideal = min(top, held-out items) hits."""
    gains = 1 / np.log2(np.arange(2, top + 2))
    ideal = np.cumsum(gains)
    recalls, ndcgs = [], []
    for user, held_out_items in held_out.items():
        if not held_out_items:
            continue
        relevant = set(held_out_items)
        hits = [rank for rank, item in enumerate(lists[user][:top]) if item in relevant]
        recalls.append(len(hits) / len(relevant))
        ndcgs.append(float(gains[hits].sum() / ideal[min(top, len(relevant)) - 1]))
    if not recalls:
        return RankingQuality(0.0, 0.0, 0)
    return RankingQuality(float(np.mean(recalls)), float(np.mean(ndcgs)), len(recalls))


@dataclass(frozen=True, slots=True)
class ServedLists:
    """Lists from stored records; `asked_again` were requested again after a missed deadline."""

    lists: Mapping[str, Sequence[str]]
    asked_again: int


async def served_lists(
    url: str,
    users: Sequence[str],
    on_answers: Callable[[Sequence[Mapping[str, Any]]], None],
) -> ServedLists:
    """Read the nightly lists of `users` in batches; `on_answers` gets every batch as it came.

    Only stored lists count: an answer from another source is requested again.
    """
    lists: dict[str, Sequence[str]] = {}
    asked_again = 0
    open_ones = list(users)
    options = Options(k=TOP, deadline_ms=DEADLINE_MS)
    # Sent once, so that what the service counted is what was asked.
    async with AsyncClient(url, policy=Policy(attempts=1, max_batch=BATCH)) as larder:
        for _ in range(TRIES):
            for start in range(0, len(open_ones), BATCH):
                batch = open_ones[start : start + BATCH]
                answers = await larder.lookup_many("user_topk", batch, options)
                on_answers([answer_to_json(answer) for answer in answers])
                lists |= {
                    str(answer.id): answer.items or ()
                    for answer in answers
                    if answer.source in STORED_SOURCES
                }
            open_ones = [user for user in open_ones if user not in lists]
            if not open_ones:
                return ServedLists(lists, asked_again)
            asked_again += len(open_ones)
    raise RuntimeError(
        f"{len(open_ones)} users of the night are not answered from it, e.g. {open_ones[0]}"
    )


def answer_to_json(answer: Answer) -> dict[str, Any]:
    """Return the fields that were set, as the service sent them."""
    value_by_name = {
        answer_field.name: getattr(answer, answer_field.name) for answer_field in fields(answer)
    }
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in value_by_name.items()
        if value is not None
    }


def offline_lists(
    bundle: Path,
    histories: Lists,
    users: Iterable[str],
    progress: Progress,
    profiles: Profiles | None = None,
) -> dict[str, list[str]]:
    """Rank by exact float32 scores of the bundle's own towers in plain numpy, without the history.

    `profiles` are for towers that take features; the items are then those that have some, else the bundle's.
    """
    model = orjson.loads((bundle / "bundle.json").read_bytes())
    bundle_item_ids: list[str] = pq.read_table(bundle / model["items"]["path"])["id"].to_pylist()
    index = {item: row for row, item in enumerate(bundle_item_ids)}
    ids = bundle_item_ids if profiles is None else list(profiles.items)
    number = {item: row for row, item in enumerate(ids)}
    item_features = {} if profiles is None else profiles.items
    user_features = {} if profiles is None else profiles.users
    item_index_rows = [[index.get(item, -1)] for item in ids]
    vectors = _run(
        bundle, model["item_tower"], item_index_rows, [item_features.get(item, {}) for item in ids]
    )
    lists: dict[str, list[str]] = {}
    ordered_users = sorted(users, key=lambda user: len(histories[user]))
    for batch_users in _batches(ordered_users, histories, vectors.shape[1]):
        rows = [[index[item] for item in histories[user] if item in index] for user in batch_users]
        features = [user_features.get(user, {}) for user in batch_users]
        scores = _run(bundle, model["user_tower"], rows, features) @ vectors.T
        for line, user in zip(scores, batch_users, strict=True):
            line[[number[item] for item in histories[user] if item in number]] = -np.inf
        for user, line, bound in zip(batch_users, scores, _bounds(scores), strict=True):
            candidate_columns = np.flatnonzero((line >= bound) & (line > -np.inf))
            order = candidate_columns[np.lexsort((candidate_columns, -line[candidate_columns]))][
                :TOP
            ]
            lists[user] = [ids[column] for column in order]
        progress(len(batch_users))
    return lists


def _bounds(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return lower bounds of each row's best TOP: as many blocks of columns have a maximum this high."""
    blocks = scores.shape[1] // _BLOCK
    if blocks < TOP:
        return np.full(len(scores), -np.inf, np.float32)
    highest = scores[:, : blocks * _BLOCK].reshape(len(scores), blocks, _BLOCK).max(axis=2)
    bounds: NDArray[np.float32] = np.partition(highest, blocks - TOP, axis=1)[:, blocks - TOP]
    return bounds


_sessions: dict[str, ort.InferenceSession] = {}


def _run(
    bundle: Path,
    tower: Mapping[str, Any],
    rows: Sequence[Sequence[int]],
    features: Sequence[Features],
) -> NDArray[np.float32]:
    """Run a tower on histories, or items' own numbers, in `rows`, with one set of features per row."""
    path = str(bundle / tower["path"])
    key = f"{path}:{tower['sha256']}"
    if key not in _sessions:
        _sessions[key] = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {
        input_spec["name"]: _input(input_spec, rows, features) for input_spec in tower["inputs"]
    }
    outputs: NDArray[np.float32] = _sessions[key].run([tower["output"]], feed)[0]
    return outputs


def _input(
    spec: Mapping[str, Any], rows: Sequence[Sequence[int]], features: Sequence[Features]
) -> NDArray[Any]:
    match spec["bind"]:
        case "history":
            return _padded(rows, spec)
        case "item_index":
            return np.array(rows, spec["dtype"])[:, 0]
        case _:
            dtype = object if spec["dtype"] == "string" else spec["dtype"]
            return np.array(
                [entity_features[spec["column"]] for entity_features in features], dtype
            )


def _padded(rows: Sequence[Sequence[int]], spec: Mapping[str, Any]) -> NDArray[Any]:
    length = min(spec["max_length"], max(1, *(len(row) for row in rows), 1))
    matrix = np.full((len(rows), length), spec["pad"], spec["dtype"])
    for line, row in zip(matrix, rows, strict=True):
        recent_indices = row[-length:]
        line[: len(recent_indices)] = recent_indices
    return matrix


def _batches(users: Sequence[str], histories: Lists, dims: int) -> Iterator[list[str]]:
    """Yield users grouped by history length, so that a batch's gathered embeddings stay within 32 MB."""
    batch: list[str] = []
    for user in users:
        full = (len(batch) + 1) * max(16, len(histories[user])) * dims > _PADDED_NUMBERS
        if batch and (full or len(batch) == _BATCH_ROWS):
            yield batch
            batch = []
        batch.append(user)
    if batch:
        yield batch
