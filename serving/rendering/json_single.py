"""JSON answers of the hot route from stored records, the very bytes that the ladder's would be. Pure."""

import numpy as np
import orjson

from cache.filters.masks import FilterMask
from cache.format.manifest import Table
from cache.format.records.codec import decode
from cache.format.records.layout import NIGHTLY, plain_bits
from cache.tiers.l1 import ReadyAnswer
from cache.tiers.results import Hit
from serving.answers.sources import STORED_SOURCES, Source
from serving.generations.snapshot import Snapshot
from serving.rendering.answer_fields import JSON, AnswerJson, age_s, from_record, is_cut, origin_of
from serving.rendering.json_batch import plain_record_mask, texts_of

AGE = "age_seconds"
"""The one field of a stored answer that differs each time it is sent."""


class StaticTail:
    """Closing fields of all answers from the batch records of a snapshot, for as long as it is served."""

    def __init__(self, snapshot: Snapshot, stale: str | None) -> None:
        self.snapshot, self.stale = snapshot, stale
        origins = {
            tier: origin_of(snapshot, tier, "batch", 0.0, stale=stale) for tier in STORED_SOURCES
        }
        self._heads = {tier: _around_age(origin)[0] for tier, origin in origins.items()}
        self._tail = _around_age(origins[Source.L1])[1]

    def age(self, now_s: float) -> bytes:
        """`age_seconds` at a time in Unix seconds."""
        return orjson.dumps(age_s(self.snapshot, now_s))

    def ends(self, age: bytes) -> dict[Source, bytes]:
        """Ends of an answer by tier, from the comma after the prediction to the closing brace."""
        return {tier: head + age + self._tail for tier, head in self._heads.items()}

    def end(self, tier: Source, now_s: float) -> bytes:
        """End of an answer from one tier, at a time in Unix seconds."""
        return b"".join((self._heads[tier], self.age(now_s), self._tail))

    def ready(
        self,
        start: bytes,
        entity_name: tuple[str, bytes],
        request: bytes,
        events: bytes | None = None,
        *,
        by_attributes: bool,
    ) -> ReadyAnswer:
        """An answer from L1 whose prediction is `start`, for when it is asked for again.

        With `by_attributes` it depends on those of items, which events may set anew.
        """
        head, snapshot = start + self._heads[Source.L1], self.snapshot
        stamp, data_until = snapshot.stamp, snapshot.manifest.data_until
        if by_attributes:
            stamp = snapshot.values_stamp
        return ReadyAnswer(stamp, head, self._tail, data_until, entity_name, request, events=events)


def ready_with_events(
    snapshot: Snapshot, answer: AnswerJson, raw: bytes, request: bytes, events: bytes
) -> ReadyAnswer:
    """An answer from L1 that counts a user's newer events, for when it is asked for again before there are others."""
    head, tail = _around_age(answer)
    return ReadyAnswer(
        snapshot.stamp, b"{" + head[1:], tail, snapshot.manifest.data_until, (answer["table"], raw),
        request, events=events, is_newer=True,
    )  # fmt: skip


def _around_age(origin: AnswerJson) -> tuple[bytes, bytes]:
    """JSON of an answer, or of its origin alone: up to its age, which is a number, and on from there to the brace."""
    fields = list(origin.items())
    at = list(origin).index(AGE)
    fields_before, after = dict(fields[:at]), dict(fields[at + 1 :])
    head = b",%b,%b:" % (orjson.dumps(fields_before, option=JSON)[1:-1], orjson.dumps(AGE))
    return head, b"," + orjson.dumps(after)[1:]


def start_of(
    snapshot: Snapshot,
    table: Table,
    hit: Hit,
    id_: str,
    k: int,
    filter_mask: FilterMask | None = None,
) -> bytes | None:
    """The answer's JSON up to its source, for an entity that sent nothing to compute from.

    None for what is no plain answer: a live record, one with a flag to tell or beyond reading, an emptied list, a full
    one of which fewer than `k` pass the filter.
    """
    is_row = len(hit.record) == table.layout.size_bytes
    try:
        if table.kind == "topk" and is_row and filter_mask is None:
            row = np.frombuffer(hit.record, table.layout.dtype)
            if plain_record_mask(snapshot, table, row, k)[0]:
                return texts_of(snapshot, table, [id_], row, k, [b""])[0]
        # For vectors and values a row alone costs as much as its fields do.
        record = decode(table.layout, hit.record, snapshot.items.count)
        if record.flags & plain_bits() != NIGHTLY:
            return None
        width = k if table.kind == "topk" else table.layout.width
        prediction = from_record(snapshot, table, record, width, (), filter_mask)
    except (
        Exception
    ):  # whatever a record holds, it costs nobody an answer: the ladder says what is wrong
        return None
    if record.items is not None and not prediction["items"]:
        return None
    if filter_mask is not None and is_cut(prediction, record, table):
        return None
    return orjson.dumps({"id": id_, "table": table.name, **prediction}, option=JSON)[:-1]
