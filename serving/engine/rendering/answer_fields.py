"""Answer fields of one entity: a record as JSON-able fields, without excluded, blocked and filtered items. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.model.filter_mask import FilterMask
from cache.records import Record
from serving.generations.snapshot import Snapshot
from serving.requests.answers import Source
from serving.requests.models import RequestedEntity

AnswerJson = dict[str, Any]
Prediction = dict[str, Any]
JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
Exclusions = tuple[frozenset[int], ...]
"""Ordinals to leave out, as sets that are built once and shared by many entities."""


class Reranker(Protocol):
    """Re-ranking of a list; the hook `shape` creates it."""

    def rerank(
        self, candidate_ordinals: NDArray[np.uint32], candidate_scores: NDArray[np.float32], k: int
    ) -> NDArray[np.int64]:
        """Return positions int64 of at most k candidates in their new order; `candidates` are sorted best first."""


class SentHistory(NamedTuple):
    """A sent history in one generation: the numbers of its items, and how many ids the models do not know."""

    item_numbers: frozenset[int]
    unknown_id_count: int


_NO_HISTORY = SentHistory(frozenset(), 0)


def prediction_from_record(
    snapshot: Snapshot,
    table: Table,
    record: Record,
    k: int,
    exclusions: Exclusions,
    filter_mask: FilterMask | None = None,
    reranker: Reranker | None = None,
) -> Prediction:
    """Return the prediction of a stored or live record, without excluded, blocked and filtered items."""
    if record.item_ordinals is not None:
        return _build_top_list(snapshot, record.item_ordinals, record.numbers, k, exclusions, filter_mask, reranker)
    if table.kind == "vector":
        return {"vector": record.numbers}
    return {"values": record.numbers, "labels": table.labels}


def may_have_more_items(prediction: Prediction, record: Record, table: Table, *, lacks_history: bool = False) -> bool:
    """True if more items than those of the record may pass a filter: fewer than `k` passed, and the list is full.

    A list that is not full holds all items that the entity may have, except with `lacks_history`: then it was computed
    without the items of a history that this request does not send.
    """
    is_full = record.item_ordinals is not None and len(record.item_ordinals) == table.layout.width
    return bool(prediction["short"]) and (is_full or lacks_history)


def prediction_from_defaults(
    snapshot: Snapshot,
    table: Table,
    entity: RequestedEntity,
    k: int,
    exclusions: Exclusions,
    filter_mask: FilterMask | None = None,
    reranker: Reranker | None = None,
) -> Prediction:
    """Return the default list of a top-K table without the sent history; null for other kinds of tables."""
    if table.kind == "vector":
        return {"vector": None}
    if table.kind == "value":
        return {"values": None, "labels": table.labels}
    default_list = snapshot.default_list_by_table.get(table.name)
    if default_list is None:
        return {"items": [], "scores": [], "short": True}
    exclusions = (*exclusions, default_list.ordinals_among(entity.history))
    if table.entity == "item" and entity.raw_id is not None:
        # An item is not similar to itself, however popular it is.
        exclusions = (*exclusions, default_list.ordinals_among((entity.raw_id,)))
    return _build_top_list(
        snapshot, default_list.item_ordinals, default_list.item_scores, k, exclusions, filter_mask, reranker
    )


def history_in(snapshot: Snapshot, history: Sequence[bytes] | None) -> SentHistory:
    """Return the sent history in terms of one generation; repeated ids count once, as in live inference."""
    if not history:
        return _NO_HISTORY
    history_ids = list(dict.fromkeys(history))
    ordinals = snapshot.items.ordinals_of(history_ids)
    unknown_id_count = int((snapshot.items.model_indices_of(ordinals) < 0).sum())
    item_numbers = snapshot.new_items.item_numbers_of(history_ids, ordinals)
    return SentHistory(frozenset(item_numbers.tolist()), unknown_id_count)


def _build_top_list(
    snapshot: Snapshot,
    item_ordinals: NDArray[np.uint32],
    item_scores: NDArray[np.float32],
    k: int,
    exclusions: Exclusions,
    filter_mask: FilterMask | None,
    reranker: Reranker | None,
) -> Prediction:
    """Return the first k of a list, in its order or a re-ranker's, without excluded, blocked or filtered items."""
    if filter_mask is not None:
        is_passing = filter_mask.among(item_ordinals)
        item_ordinals, item_scores = item_ordinals[is_passing], item_scores[is_passing]
    excluded_sets = [excluded_set for excluded_set in (*exclusions, snapshot.blocked_item_numbers) if excluded_set]
    if excluded_sets:
        ordinals = item_ordinals.tolist()
        kept_indexes = list(range(len(ordinals)))
        for excluded_set in excluded_sets:
            kept_indexes = [index for index in kept_indexes if ordinals[index] not in excluded_set]
        item_ordinals, item_scores = item_ordinals[kept_indexes], item_scores[kept_indexes]
    return build_list(snapshot, item_ordinals, item_scores, k, reranker)


def build_list(
    snapshot: Snapshot,
    item_ordinals: NDArray[np.uint32],
    item_scores: NDArray[np.float32],
    k: int,
    reranker: Reranker | None,
) -> Prediction:
    """Return a list of the first k items, in the given order or a re-ranker's."""
    selection = slice(k) if reranker is None else reranker.rerank(item_ordinals, item_scores, k)
    item_ordinals, item_scores = item_ordinals[selection], item_scores[selection]
    item_table, new_items = snapshot.items, snapshot.new_items
    item_ids = new_items.ids_of(item_table, item_ordinals) if new_items else item_table.ids_of(item_ordinals)
    return {"items": item_ids, "scores": item_scores, "short": len(item_ordinals) < k}


def iso_time(unix_s: float) -> str:
    """Format Unix seconds as RFC 3339 in UTC, to the millisecond."""
    iso_text = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    return iso_text.replace("+00:00", "Z")


def data_age_s(snapshot: Snapshot, now_s: float) -> float:
    """Return the age in seconds of the generation's data at a time in Unix seconds."""
    return round(now_s - snapshot.manifest.data_until, 3)


def origin_fields(
    snapshot: Snapshot, source: Source, producer: str | None, now_s: float, **optional_fields: object
) -> AnswerJson:
    """Return the fields of `Origin` that follow the prediction, in order, without `optional_fields` that are None."""
    origin: AnswerJson = {
        "source": source,
        "producer": producer,
        "generation": snapshot.generation,
        "age_seconds": data_age_s(snapshot, now_s),
        "published_at": snapshot.published_at,
    }
    for field_name, field_value in optional_fields.items():
        if field_value is not None:
            origin[field_name] = field_value
    return origin


def complete_answer(
    prediction: Prediction,
    snapshot: Snapshot,
    table_name: str,
    entity: RequestedEntity,
    source: Source,
    producer: str | None,
    now_s: float,
    **optional_fields: object,
) -> AnswerJson:
    """Return the prediction with the fields of its origin."""
    answer: AnswerJson = {"id": entity.id, "table": table_name}
    answer |= prediction
    answer |= origin_fields(snapshot, source, producer, now_s, **optional_fields)
    return answer
