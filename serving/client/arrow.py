"""The client's binary form: batches as Arrow IPC streams, which come out as from JSON. Pure."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

from serving.answers.fields import Answer
from serving.arrow_ipc.flatbuffers import Malformed
from serving.arrow_ipc.messages import Unsupported
from serving.arrow_ipc.reader import read
from serving.arrow_ipc.schema import Field
from serving.arrow_ipc.writer import stream, whole_texts
from serving.client.answers import source_of
from serving.client.errors import Garbled


def write_arrow_ids(ids: Sequence[str], options: Mapping[str, str]) -> bytes:
    """The body that asks for `ids`; options are the schema's metadata."""
    column = whole_texts([entity_id.encode() for entity_id in ids])
    return stream((Field("id", "utf8"),), [column], len(ids), tuple(options.items()))


def read_arrow_answers(raw: bytes, count: int) -> list[Answer]:
    """The answers of one batch of `count` entities, in their order. Raises Garbled."""
    try:
        frame = read(raw, count)
    except (Malformed, Unsupported) as error:
        raise Garbled(
            f"the body is no Arrow IPC stream: {error}; it begins {raw[:80]!r}"
        ) from error
    if frame.rows != count:
        raise Garbled(f"{count} entities were asked, and {frame.rows} answers came")
    answer_fields = Answer.__dataclass_fields__
    names = [name for name in frame.columns if name in answer_fields and name != "id"]
    table = frame.metadata.get("table")

    def answer(id_: str | None, *values: Any) -> Answer:
        field_values = {
            name: value for name, value in zip(names, values, strict=True) if value is not None
        }
        field_values["source"] = source_of(field_values["source"])
        return Answer(id=id_, table=table, **field_values)  # type: ignore[arg-type]

    try:
        return list(
            starmap(answer, zip(*(frame.columns[name] for name in ("id", *names)), strict=True))
        )
    except (KeyError, TypeError) as error:
        raise Garbled(f"this is no answer of the service: {error}") from error
