"""JSON answers of the hot route from stored records, the very bytes that the ladder's would be. Pure."""

import orjson

from cache.format.manifest import Table
from cache.format.records import decode
from cache.tiers.l1 import Ready
from cache.tiers.results import Found
from serving.generations.snapshot import Snapshot
from serving.rendering.answer_fields import from_record

JSON = orjson.OPT_SERIALIZE_NUMPY
_AGE = b',"age_seconds":'


class Marks:
    """Closing fields of all answers from the batch records of a snapshot, for as long as it is served."""

    def __init__(self, snapshot: Snapshot, stale: str | None) -> None:
        self.snapshot, self.stale = snapshot, stale
        generation, published_at = map(orjson.dumps, (snapshot.generation, snapshot.published_at))
        middle = b'","producer":"batch","generation":' + generation + _AGE
        self._heads = {tier: b',"source":"' + tier.encode() + middle for tier in ("l1", "l2")}
        self._tail = b',"published_at":' + published_at
        if stale is not None:
            self._tail += b',"stale":' + orjson.dumps(stale)
        self._tail += b"}"
        self._data_until = snapshot.manifest.data_until

    def age(self, now: float) -> bytes:
        """`age_seconds` at a time in Unix seconds."""
        return orjson.dumps(round(now - self._data_until, 3))

    def ends(self, age: bytes) -> dict[str, bytes]:
        """Ends of an answer by tier, from the comma after the prediction to the closing brace."""
        return {tier: head + age + self._tail for tier, head in self._heads.items()}

    def end(self, tier: str, now: float) -> bytes:
        """End of an answer from one tier, at a time in Unix seconds."""
        return b"".join((self._heads[tier], self.age(now), self._tail))

    def ready(self, start: bytes, asked: tuple[str, bytes], request: bytes) -> Ready:
        """An answer from L1 whose prediction is `start`, for when it is asked for again."""
        head = start + self._heads["l1"]
        return Ready(self.snapshot.stamp, head, self._tail, self._data_until, asked, request)


def start_of(snapshot: Snapshot, table: Table, found: Found, id_: str, k: int) -> bytes | None:
    """The answer's JSON up to its source, for an entity that sent nothing to compute from.

    None for what is no plain answer: a live record, one that cannot be read, a list of which nothing is left.
    """
    try:
        record = decode(table.layout, found.record, snapshot.items.count)
        if record.live:
            return None
        items, numbers = record.items, record.numbers
        if items is not None and len(items) >= k and not snapshot.blocked:
            listed = snapshot.items.texts.row(items[:k])
            scores = orjson.dumps(numbers[:k], option=JSON)
            name, of = orjson.dumps(id_), orjson.dumps(table.name)
            return b'{"id":%b,"table":%b,"items":[%b],"scores":%b,"short":false' % (
                name, of, listed, scores,
            )  # fmt: skip
        width = k if table.kind == "topk" else table.layout.width
        prediction = from_record(snapshot, table, record, width, ())
    except (
        Exception
    ):  # whatever a record holds, it costs nobody an answer: the ladder says what is wrong
        return None
    if items is not None and not prediction["items"]:
        return None
    return orjson.dumps({"id": id_, "table": table.name, **prediction}, option=JSON)[:-1]
