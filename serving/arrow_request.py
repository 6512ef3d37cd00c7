"""A batch as an Arrow IPC stream, one column of ids, options as the schema's metadata. Pure."""

from typing import NamedTuple

from cache import compiled
from cache.keys import are_ids
from serving.arrow_flat import Malformed
from serving.arrow_messages import Unsupported
from serving.arrow_read import Frame, read
from serving.ask import Ask, Entity, Limits
from serving.fields import check_length, read_id
from serving.options import text_options
from serving.plan import Batch
from serving.problem import Problem, unprocessable

ID = "id"
_K_DIGITS_MAX = 5
_OTHERS = ("pandas", "ARROW:")
"""How the metadata begins that other tools leave; it means nothing here."""


class Sent(NamedTuple):
    """Ids that were sent, as bytes of UTF-8, and options by name as texts."""

    ids: list[bytes]
    options: dict[str, str]


def sent(body: bytes, limits: Limits) -> Sent:
    """The ids, unchecked but for their number; raises Problem for what is no such stream."""
    try:
        # One more than allowed is enough to tell.
        columns = compiled.columns()
        cutter = None if columns is None else columns.cut_texts
        frame = read(body, limits.max_batch + 1, as_bytes=True, cutter=cutter)
    except Malformed as error:
        raise unprocessable(
            "invalid_arrow", f"the body is no Arrow IPC stream of ids: {error}", "body"
        ) from error
    except Unsupported as error:
        raise unprocessable("unsupported_arrow", str(error), "body") from error
    ids = _ids(frame)
    check_length(ids, 1, limits.max_batch, "entities", "batch_too_long")
    options = {name: text for name, text in frame.metadata.items() if not name.startswith(_OTHERS)}
    return Sent(ids, options)


def batch(body: bytes, limits: Limits) -> Batch | None:
    """What the hot route understands of it: plain ids and perhaps `k`; None for all that is told elsewhere."""
    try:
        raws, options = sent(body, limits)
    except Problem:
        return None
    if not are_ids(raws) or not options.keys() <= {"k"}:
        return None
    k = options.get("k")
    if k is None:
        return Batch(raws, None)
    is_k = k.isascii() and k.isdigit() and len(k) <= _K_DIGITS_MAX and int(k) > 0
    return Batch(raws, int(k)) if is_k else None


def lookup_arrow(body: bytes, table: str, limits: Limits) -> Ask:
    """The body of POST /v1/lookup/{table}."""
    found, options = sent(body, limits)
    ids = [each.decode() for each in found]
    raws = [read_id(each, f"entities[{place}]") for place, each in enumerate(ids)]
    entities = tuple(
        Entity(table, id_, raw, f"entities[{place}]")
        for place, (id_, raw) in enumerate(zip(ids, raws, strict=True))
    )
    return Ask(entities, text_options(options, limits))


def _ids(frame: Frame) -> list[bytes]:
    field = frame.fields.get(ID)
    if field is None or len(frame.fields) != 1 or field.kind not in ("utf8", "large_utf8"):
        raise unprocessable(
            "invalid_field",
            f"a batch is one column {ID!r} of utf8; histories and features go as JSON",
            "entities",
        )
    ids = frame.columns[ID]
    if None in ids:
        place = ids.index(None)
        raise unprocessable("invalid_field", f"entities[{place}] is null", f"entities[{place}]")
    return ids
