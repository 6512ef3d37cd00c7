"""A batch as an Arrow IPC stream, one column of ids, options as the schema's metadata. Pure."""

from typing import NamedTuple

from cache.format.ids import are_ids
from cache.native import loader
from serving.arrow_ipc.flatbuffers import Malformed
from serving.arrow_ipc.messages import Unsupported
from serving.arrow_ipc.reader import read
from serving.arrow_ipc.schema import Field
from serving.requests.errors import unprocessable
from serving.requests.fast_parse import IdBatch
from serving.requests.fields import check_length, read_id
from serving.requests.models import Limits, LookupRequest, RequestedEntity
from serving.requests.options import text_options

ID = "id"
_K_DIGITS_MAX = 5
_FOREIGN_PREFIXES = ("pandas", "ARROW:")
"""Prefixes of metadata names that other tools leave; they mean nothing here."""


class ArrowLookup(NamedTuple):
    """Ids that were sent, as bytes of UTF-8, and options by name as texts."""

    ids: list[bytes]
    options: dict[str, str]


def read_stream(body: bytes, limits: Limits) -> ArrowLookup:
    """The ids, unchecked but for their number; raises Problem for what is no such stream."""
    try:
        # One more than allowed is enough to tell.
        cutter = loader.kernels.cut_texts
        rows_max = limits.max_batch + 1
        frame = read(body, rows_max, as_bytes=True, cutter=cutter, check=_check_column)
    except Malformed as error:
        raise unprocessable(
            "invalid_arrow", f"the body is no Arrow IPC stream of ids: {error}", "body"
        ) from error
    except Unsupported as error:
        raise unprocessable("unsupported_arrow", str(error), "body") from error
    ids = frame.columns[ID]
    if None in ids:
        index = ids.index(None)
        raise unprocessable("invalid_field", f"entities[{index}] is null", f"entities[{index}]")
    check_length(ids, 1, limits.max_batch, "entities", "batch_too_long")
    options = {
        name: text
        for name, text in frame.metadata.items()
        if not name.startswith(_FOREIGN_PREFIXES)
    }
    return ArrowLookup(ids, options)


def batch(id_stream: ArrowLookup) -> IdBatch | None:
    """Batch for the hot route: plain ids and perhaps `k`; None for all that other routes handle."""
    raws, options = id_stream
    if not are_ids(raws) or not options.keys() <= {"k"}:
        return None
    k = options.get("k")
    if k is None:
        return IdBatch(raws, None)
    is_k = k.isascii() and k.isdigit() and len(k) <= _K_DIGITS_MAX and int(k) > 0
    return IdBatch(raws, int(k)) if is_k else None


def stream_lookup(id_stream: ArrowLookup, table: str, limits: Limits) -> LookupRequest:
    """Lookup from the stream of POST /v1/lookup/{table}."""
    ids = [raw_id.decode() for raw_id in id_stream.ids]
    raws = [read_id(text_id, f"entities[{index}]") for index, text_id in enumerate(ids)]
    entities = tuple(
        RequestedEntity(table, id_, raw, f"entities[{index}]")
        for index, (id_, raw) in enumerate(zip(ids, raws, strict=True))
    )
    return LookupRequest(entities, text_options(id_stream.options, limits))


def _check_column(fields: tuple[Field, ...]) -> None:
    if [field.name for field in fields] != [ID] or fields[0].kind not in ("utf8", "large_utf8"):
        raise unprocessable(
            "invalid_field",
            f"a batch is one column {ID!r} of utf8; histories and features go as JSON",
            "entities",
        )
