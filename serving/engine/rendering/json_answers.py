"""JSON answers made directly from stored records, one or many, byte-equal to the ladder's. Pure."""

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
    JSON_OPTIONS,
    AnswerJson,
    data_age_s,
    may_have_more_items,
    origin_fields,
    prediction_from_record,
)
from serving.generations.snapshot import Snapshot
from serving.requests.answers import PREDICTION_FIELDS_BY_KIND, STORED_SOURCES, Source

AGE_FIELD = "age_seconds"
"""The only field of a stored answer that differs each time it is sent."""

_ITEMS_KEY, _SCORES_KEY, _SHORT_KEY = [
    answer_field.json_key_bytes for answer_field in PREDICTION_FIELDS_BY_KIND["topk"]
]
_ITEMS_BEGIN, _SCORES_BEGIN, _LIST_END = (_ITEMS_KEY + b"[", b"]" + _SCORES_KEY + b"[", b"]" + _SHORT_KEY + b"false")

(_VECTOR_KEY,), (_VALUES_KEY, _LABELS_KEY) = [
    [answer_field.json_key_bytes for answer_field in PREDICTION_FIELDS_BY_KIND[kind]] for kind in ("vector", "value")
]

_NUMERAL_TEXTS = Numerals()


class StaticTail:
    """Closing fields of all answers from the batch records of a snapshot, for as long as it is served."""

    def __init__(self, snapshot: Snapshot, stale_reason: str | None) -> None:
        self.snapshot, self.stale_reason = snapshot, stale_reason
        origins = {tier: origin_fields(snapshot, tier, "batch", 0.0, stale=stale_reason) for tier in STORED_SOURCES}
        self._head_by_tier = {tier: _split_at_age(origin)[0] for tier, origin in origins.items()}
        self._tail = _split_at_age(origins[Source.L1])[1]

    def age_json(self, now_s: float) -> bytes:
        """Return `age_seconds` as JSON, at a time in Unix seconds."""
        return orjson.dumps(data_age_s(self.snapshot, now_s))

    def answer_end_by_tier(self, age_json: bytes) -> dict[Source, bytes]:
        """Return the end of an answer by tier, from the comma after the prediction to the closing brace."""
        return {tier: head + age_json + self._tail for tier, head in self._head_by_tier.items()}

    def end_of_answer(self, tier: Source, now_s: float) -> bytes:
        """Return the end of an answer from one tier, at a time in Unix seconds."""
        return b"".join((self._head_by_tier[tier], self.age_json(now_s), self._tail))

    def build_ready_answer(
        self,
        prediction_json: bytes,
        table_and_id: tuple[str, bytes],
        request_target: bytes,
        packed_user_events: bytes | None = None,
        *,
        depends_on_item_attributes: bool,
    ) -> ReadyAnswer:
        """Return the ready answer from L1 with the prediction `prediction_json`, for later identical requests.

        With `depends_on_item_attributes` it also becomes invalid when events change attributes of items.
        """
        head, snapshot = prediction_json + self._head_by_tier[Source.L1], self.snapshot
        stamp, data_until = snapshot.stamp, snapshot.manifest.data_until
        if depends_on_item_attributes:
            stamp = snapshot.item_values_stamp
        return ReadyAnswer(
            stamp, head, self._tail, data_until, table_and_id, request_target, user_events=packed_user_events
        )


def ready_with_events(
    snapshot: Snapshot, answer: AnswerJson, raw_id: bytes, request_target: bytes, packed_user_events: bytes
) -> ReadyAnswer:
    """Return a ready answer from L1 that counts a user's newer events, valid until these change."""
    head, tail = _split_at_age(answer)
    return ReadyAnswer(
        snapshot.stamp, b"{" + head[1:], tail, snapshot.manifest.data_until, (answer["table"], raw_id),
        request_target, user_events=packed_user_events, has_newer_events=True,
    )  # fmt: skip


def _split_at_age(origin: AnswerJson) -> tuple[bytes, bytes]:
    """Split an answer's JSON at the value of `age_seconds`; return the part before and the part after the number."""
    fields = list(origin.items())
    age_index = list(origin).index(AGE_FIELD)
    fields_before, fields_after = dict(fields[:age_index]), dict(fields[age_index + 1 :])
    head = b",%b,%b:" % (orjson.dumps(fields_before, option=JSON_OPTIONS)[1:-1], orjson.dumps(AGE_FIELD))
    return head, b"," + orjson.dumps(fields_after)[1:]


def answer_start(
    snapshot: Snapshot, table: Table, hit: Hit, entity_id: str, k: int, filter_mask: FilterMask | None = None
) -> bytes | None:
    """Return the answer's JSON up to its source, for an entity without an input.

    None for a record that is not a plain answer: a live or unreadable record, one with a flag to report, a list without
    items left, or a full list of which fewer than `k` items pass the filter.
    """
    is_whole_record = len(hit.record) == table.layout.size_bytes
    try:
        if is_whole_record and table.layout.kind == "topk" and filter_mask is None:
            record_row = np.frombuffer(hit.record, table.layout.dtype)
            if plain_record_mask(snapshot, table, record_row, k)[0]:
                return answer_texts(snapshot, table, [entity_id], record_row, k, [b""])[0]
        # For vectors and values numpy rendering of a single row saves nothing.
        record = decode_record(table.layout, hit.record, snapshot.items.count)
        if record.flags & plain_answer_bits() != NIGHTLY_FLAGS:
            return None
        number_count = k if table.kind == "topk" else table.layout.width
        prediction = prediction_from_record(snapshot, table, record, number_count, (), filter_mask)
    except Exception:  # a damaged record: the ladder reads and reports it
        return None
    if record.item_ordinals is not None and not prediction["items"]:
        return None
    if filter_mask is not None and may_have_more_items(prediction, record, table):
        return None
    return orjson.dumps({"id": entity_id, "table": table.name, **prediction}, option=JSON_OPTIONS)[:-1]


def answer_texts(
    snapshot: Snapshot,
    table: Table,
    entity_ids: Sequence[str],
    record_rows: NDArray[Any],
    k: int,
    answer_ends: Sequence[bytes],
) -> list[bytes]:
    """Return each answer's JSON from records that `plain_record_mask` accepts; `answer_ends` follow the prediction."""
    quoted_ids = _id_json_texts(entity_ids)
    table_name_json = b'","table":%b' % orjson.dumps(table.name)
    kind = table.layout.kind
    if kind == "topk":
        compiled_texts = _render_compiled(snapshot, table, quoted_ids, table_name_json, record_rows, k, answer_ends)
        if compiled_texts is not None:
            return compiled_texts
    list_texts = [list_text[2:] for list_text in _row_json_texts(record_numbers(table, record_rows, k))]
    head = repeat(b'{"id":"')
    if kind == "topk":
        middle_pieces, after_items = repeat(table_name_json + _ITEMS_BEGIN), repeat(_SCORES_BEGIN)
        items = snapshot.items.json_texts.json_lines(record_rows["items"][:, :k])
        answer_parts = (head, quoted_ids, middle_pieces, items, after_items, list_texts, repeat(_LIST_END), answer_ends)
        return [b"".join(answer_pieces) for answer_pieces in zip(*answer_parts, strict=False)]
    field_key, last_piece = _VECTOR_KEY, b"]"
    if kind == "value":
        field_key, last_piece = _VALUES_KEY, b"]" + _LABELS_KEY + orjson.dumps(table.labels)
    middle_pieces = repeat(table_name_json + field_key + b"[")
    number_answer_parts = head, quoted_ids, middle_pieces, list_texts, repeat(last_piece), answer_ends
    return [b"".join(answer_pieces) for answer_pieces in zip(*number_answer_parts, strict=False)]


def _id_json_texts(entity_ids: Sequence[str]) -> list[bytes]:
    """Return the JSON of each id, without quotes."""
    # One call for all ids. A quote inside a string is escaped, so only an id that ends in `",` would be split.
    ids_json = orjson.dumps(entity_ids)[2:-2]
    if b'\\","' in ids_json:
        return [orjson.dumps(entity_id)[1:-1] for entity_id in entity_ids]
    return ids_json.split(b'","')


def _render_compiled(
    snapshot: Snapshot,
    table: Table,
    quoted_ids: list[bytes],
    table_name_json: bytes,
    record_rows: NDArray[Any],
    k: int,
    answer_ends: Sequence[bytes],
) -> list[bytes] | None:
    """Render lists by compiled code; return None if it does not support them.

    `quoted_ids` have no quotes; `table_name_json` begins with the closing quote.
    """
    layout = table.layout
    for _ in range(2):
        kernel_result = loader.kernels.answers(
            record_rows, layout.width, layout.precision == "f2", k, *snapshot.items.shared_ids,
            _NUMERAL_TEXTS.text_rows,
            b'{"id":"', quoted_ids, table_name_json + _ITEMS_BEGIN, _SCORES_BEGIN, _LIST_END, list(answer_ends),
        )  # fmt: skip
        if not isinstance(kernel_result, tuple):
            return kernel_result
        _NUMERAL_TEXTS.write(kernel_result)
    return None


def _row_json_texts(row_numbers: NDArray[np.float32]) -> list[bytes]:
    """Return the JSON of each row after two bytes that the caller skips: splitting at a single byte is faster."""
    return (b"," + orjson.dumps(row_numbers, option=JSON_OPTIONS)[1:-2]).split(b"]")


def record_numbers(table: Table, record_rows: NDArray[Any], k: int) -> NDArray[np.float32]:
    """Return float32[n, k] of records that `plain_record_mask` accepts: scores, or a vector's or value's numbers."""
    layout = table.layout
    is_list = layout.kind == "topk"
    if layout.precision == "i1":
        return dequantize(layout, record_rows, np.float32)
    width, is_half = k if is_list else layout.width, layout.precision == "f2"
    packed_numbers = loader.kernels.numbers(record_rows, layout.width, is_list, is_half, width)
    return np.frombuffer(packed_numbers, np.float32).reshape(len(record_rows), width)


def plain_record_mask(snapshot: Snapshot, table: Table, record_rows: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Return a mask bool[n] of complete nightly records without flags or exclusions: `k` items each, or all numbers."""
    layout = table.layout
    is_list = layout.kind == "topk"
    width, min_count = layout.width, k if is_list else layout.width
    if layout.precision == "i1":
        with np.errstate(over="ignore", invalid="ignore"):
            finite_mask = np.isfinite(record_rows["scale"] * np.float32(128))
        nightly_mask = record_rows["flags"] & plain_answer_bits() == NIGHTLY_FLAGS
        plain_mask: NDArray[np.bool_] = nightly_mask & (record_rows["count"] == width) & finite_mask
        return plain_mask
    raw_mask = loader.kernels.plain_record_mask(
        record_rows, width, is_list, layout.precision == "f2", plain_answer_bits(), NIGHTLY_FLAGS, min_count,
        SAFE_EXPONENT, snapshot.items.count,
    )  # fmt: skip
    plain_mask = np.frombuffer(bytearray(raw_mask), np.bool_)
    if is_list and len(snapshot.blocked_item_ordinals):
        used_mask = np.arange(width) < record_rows["count"][:, None]
        plain_mask = plain_mask & ~(np.isin(record_rows["items"], snapshot.blocked_item_ordinals) & used_mask).any(
            axis=1
        )
    return plain_mask
