"""What the hot route sends: stored records as JSON, the very bytes that the ladder's answers would be. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

import orjson

from cache.local import Ready
from cache.manifest import Table
from cache.outcomes import Found
from cache.records import decode
from serving.answer import from_record
from serving.reply import EXHAUSTED
from serving.snapshot import Snapshot

JSON = orjson.OPT_SERIALIZE_NUMPY
_AGE = b',"age_seconds":'


class Unfit(Exception):
    """A stored record that is no plain answer; `reason` is what the ladder goes on with, None: it reads it itself."""

    def __init__(self, reason: str | None, *, is_damaged: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_damaged = is_damaged


class Marks(NamedTuple):
    """What all answers of a moment end with: by tier, from the comma after the prediction to the closing brace."""

    ends: Mapping[str, bytes]
    age: bytes

    @classmethod
    def of(cls, snapshot: Snapshot, now: float, stale: str | None) -> "Marks":
        """The marks of batch records of a snapshot; `now` is in Unix seconds."""
        age = orjson.dumps(round(now - snapshot.manifest.data_until, 3))
        end = b',"producer":"batch","generation":%b,"age_seconds":%b,"published_at":%b%b}' % (
            orjson.dumps(snapshot.generation),
            age,
            orjson.dumps(snapshot.published_at),
            b"" if stale is None else b',"stale":' + orjson.dumps(stale),
        )
        return cls({tier: b',"source":"%b"%b' % (tier.encode(), end) for tier in ("l1", "l2")}, age)


def as_json(
    snapshot: Snapshot, table: Table, found: Found, id_: str, k: int, marks: Marks
) -> bytes:
    """The answer of an entity that sent nothing to compute from; raises Unfit."""
    try:
        record = decode(table.layout, found.record, snapshot.items.count)
        if table.kind != "topk":
            k = table.layout.width
        prediction = from_record(snapshot, table, record, k, ())
    except Exception as error:  # whatever a record holds, it costs nobody an answer
        raise Unfit("corrupt", is_damaged=True) from error
    if record.items is not None and not prediction["items"]:
        raise Unfit(EXHAUSTED)
    if record.live:
        raise Unfit(None)
    body = orjson.dumps({"id": id_, "table": table.name, **prediction}, option=JSON)
    return body[:-1] + marks.ends[found.tier]


def ready_of(
    body: bytes, marks: Marks, snapshot: Snapshot, asked: tuple[str, bytes], request: bytes
) -> Ready:
    """An answer cut where its age stands."""
    # Quotes inside a string are escaped: these bytes can only be the field.
    head, _, rest = body.partition(_AGE)
    data_until = snapshot.manifest.data_until
    return Ready(snapshot.stamp, head + _AGE, rest[len(marks.age) :], data_until, asked, request)
