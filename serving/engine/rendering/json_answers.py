"""JSON answers straight from stored records, one or many, the very bytes that the ladder's would be. Pure."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.model.filter_mask import FilterMask
from cache.native import loader
from cache.native.loader import Numerals
from cache.records import NIGHTLY_FLAGS, SAFE_EXPONENT, decode_record, dequantize, plain_answer_bits
from cache.tiers.l1 import ReadyAnswer
from cache.tiers.reads import Hit
from serving.engine.rendering.answer_fields import (
    JSON,
    AnswerJson,
    age_s,
    from_record,
    is_cut,
    origin_of,
)
from serving.generations.snapshot import Snapshot
from serving.requests.answers import PREDICTION_FIELDS, STORED_SOURCES, Source

AGE_FIELD = "age_seconds"
"""The one field of a stored answer that differs each time it is sent."""

_ITEM_LIST, _SCORE_LIST, _SHORT = [answer_field.key for answer_field in PREDICTION_FIELDS["topk"]]
_ITEMS, _SCORES, _NOT_SHORT = _ITEM_LIST + b"[", b"]" + _SCORE_LIST + b"[", b"]" + _SHORT + b"false"

(_VECTOR,), (_VALUES, _LABELS) = [
    [answer_field.key for answer_field in PREDICTION_FIELDS[kind]] for kind in ("vector", "value")
]

_NUMERALS = Numerals()


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
        """Return the ready answer with the prediction `start` from L1, for later requests of the same bytes.

        With `by_attributes` it depends on those of items, which events may set anew.
        """
        head, snapshot = start + self._heads[Source.L1], self.snapshot
        stamp, data_until = snapshot.stamp, snapshot.manifest.data_until
        if by_attributes:
            stamp = snapshot.values_stamp
        return ReadyAnswer(
            stamp, head, self._tail, data_until, entity_name, request, user_events=events
        )


def ready_with_events(
    snapshot: Snapshot, answer: AnswerJson, raw: bytes, request: bytes, events: bytes
) -> ReadyAnswer:
    """Return a ready answer from L1 that counts a user's newer events, valid until there are others."""
    head, tail = _around_age(answer)
    return ReadyAnswer(
        snapshot.stamp, b"{" + head[1:], tail, snapshot.manifest.data_until, (answer["table"], raw),
        request, user_events=events, has_newer_events=True,
    )  # fmt: skip


def _around_age(origin: AnswerJson) -> tuple[bytes, bytes]:
    """JSON of an answer, or of its origin alone: up to its age, which is a number, and on from there to the brace."""
    fields = list(origin.items())
    at = list(origin).index(AGE_FIELD)
    fields_before, after = dict(fields[:at]), dict(fields[at + 1 :])
    head = b",%b,%b:" % (orjson.dumps(fields_before, option=JSON)[1:-1], orjson.dumps(AGE_FIELD))
    return head, b"," + orjson.dumps(after)[1:]


def answer_start(
    snapshot: Snapshot,
    table: Table,
    hit: Hit,
    id_: str,
    k: int,
    filter_mask: FilterMask | None = None,
) -> bytes | None:
    """Return the answer's JSON up to its source, for an entity without an input.

    None for a record that is no plain answer: a live or unreadable one, one with a flag to report, an emptied list, a
    full one of which fewer than `k` pass the filter.
    """
    is_row = len(hit.record) == table.layout.size_bytes
    try:
        if is_row and table.layout.kind == "topk" and filter_mask is None:
            row = np.frombuffer(hit.record, table.layout.dtype)
            if plain_record_mask(snapshot, table, row, k)[0]:
                return answer_texts(snapshot, table, [id_], row, k, [b""])[0]
        # For vectors and values a row alone costs as much as its fields do.
        record = decode_record(table.layout, hit.record, snapshot.items.count)
        if record.flags & plain_answer_bits() != NIGHTLY_FLAGS:
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


def answer_texts(
    snapshot: Snapshot,
    table: Table,
    ids: Sequence[str],
    rows: NDArray[Any],
    k: int,
    ends: Sequence[bytes],
) -> list[bytes]:
    """The JSON of each answer from a record that `plain_record_mask` marks; `ends` begin after the prediction."""
    names = _id_texts(ids)
    named = b'","table":%b' % orjson.dumps(table.name)
    kind = table.layout.kind
    if kind == "topk":
        compiled_texts = _compiled_texts(snapshot, table, names, named, rows, k, ends)
        if compiled_texts is not None:
            return compiled_texts
    lists = [list_text[2:] for list_text in _row_json_texts(record_numbers(table, rows, k))]
    head = repeat(b'{"id":"')
    if kind == "topk":
        middle, after = repeat(named + _ITEMS), repeat(_SCORES)
        items = snapshot.items.json_texts.lines(rows["items"][:, :k])
        pieces = head, names, middle, items, after, lists, repeat(_NOT_SHORT), ends
        return [b"".join(answer_pieces) for answer_pieces in zip(*pieces, strict=False)]
    field, last = _VECTOR, b"]"
    if kind == "value":
        field, last = _VALUES, b"]" + _LABELS + orjson.dumps(table.labels)
    middle = repeat(named + field + b"[")
    parts = head, names, middle, lists, repeat(last), ends
    return [b"".join(answer_pieces) for answer_pieces in zip(*parts, strict=False)]


def _id_texts(ids: Sequence[str]) -> list[bytes]:
    """JSON of each id, without its quotes."""
    # One call for all. A quote inside a string is escaped, so only an id that ends in `",` looks like two.
    dumped = orjson.dumps(ids)[2:-2]
    if b'\\","' in dumped:
        return [orjson.dumps(entity_id)[1:-1] for entity_id in ids]
    return dumped.split(b'","')


def _compiled_texts(
    snapshot: Snapshot,
    table: Table,
    names: list[bytes],
    named: bytes,
    rows: NDArray[Any],
    k: int,
    ends: Sequence[bytes],
) -> list[bytes] | None:
    """Render lists by the compiled part, None if it cannot write them; `names` and `named` end and begin in a quote."""
    layout = table.layout
    for _ in range(2):
        kernel_result = loader.kernels.answers(
            rows, layout.width, layout.precision == "f2", k, *snapshot.items.shared_ids, _NUMERALS.table,
            b'{"id":"', names, named + _ITEMS, _SCORES, _NOT_SHORT, list(ends),
        )  # fmt: skip
        if not isinstance(kernel_result, tuple):
            return kernel_result
        _NUMERALS.write(kernel_result)
    return None


def _row_json_texts(row_numbers: NDArray[np.float32]) -> list[bytes]:
    """Return the JSON of each row behind two bytes to be skipped: splitting at one byte is faster than at three."""
    return (b"," + orjson.dumps(row_numbers, option=JSON)[1:-2]).split(b"]")


def record_numbers(table: Table, rows: NDArray[Any], k: int) -> NDArray[np.float32]:
    """Numbers float32[n, k] of records that `plain_record_mask` marks: scores, or all numbers of a vector or value."""
    layout = table.layout
    is_list = layout.kind == "topk"
    if layout.precision == "i1":
        return dequantize(layout, rows, np.float32)
    width, is_half = k if is_list else layout.width, layout.precision == "f2"
    packed_numbers = loader.kernels.numbers(rows, layout.width, is_list, is_half, width)
    return np.frombuffer(packed_numbers, np.float32).reshape(len(rows), width)


def plain_record_mask(
    snapshot: Snapshot, table: Table, rows: NDArray[Any], k: int
) -> NDArray[np.bool_]:
    """Return a mask bool[n] of complete nightly records without flags or exclusions: `k` items each, or all numbers."""
    layout = table.layout
    is_list = layout.kind == "topk"
    width, min_count = layout.width, k if is_list else layout.width
    if layout.precision == "i1":
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = np.isfinite(rows["scale"] * np.float32(128))
        is_nightly = rows["flags"] & plain_answer_bits() == NIGHTLY_FLAGS
        usable: NDArray[np.bool_] = is_nightly & (rows["count"] == width) & is_finite
        return usable
    raw_mask = loader.kernels.plain_record_mask(
        rows, width, is_list, layout.precision == "f2", plain_answer_bits(), NIGHTLY_FLAGS, min_count, SAFE_EXPONENT,
        snapshot.items.count,
    )  # fmt: skip
    usable = np.frombuffer(bytearray(raw_mask), np.bool_)
    if is_list and len(snapshot.blocked_ordinals):
        used = np.arange(width) < rows["count"][:, None]
        usable = usable & ~(np.isin(rows["items"], snapshot.blocked_ordinals) & used).any(axis=1)
    return usable
