"""Bounds on inbound messages: how much has come of the one being read, and how long its connection stands still."""

from typing import Literal, NamedTuple

from cache.config.peers import Bounds
from serving.http.http1_protocol import PIECE, ProtocolViolation

BEHIND = 64 << 10
"""Bytes of requests that may wait behind one that is not answered."""

_HEAD_END = b"\r\n\r\n"
_REFUSALS = {
    408: ("head", "the request's head did not arrive in time"),
    413: ("behind", "too much is sent behind a request that is not answered yet"),
    429: ("pipeline", "too many requests of one connection are not answered yet"),
    431: ("large_head", "the request's head is too large"),
    503: ("full", "too many connections"),
}
"""Status -> what the end is counted as, and what the peer is told."""

Kind = Literal["silent", "head", "body", "write", "close"]


class ConnectionStage(NamedTuple):
    """The point at which a connection stands; `progress` differs as soon as it moved on."""

    kind: Kind
    progress: tuple[int, ...] = ()


class BoundViolation(ProtocolViolation):
    """A bound that a connection has passed, by the status that its peer gets; `kind` is what its end is counted as."""

    def __init__(self, status: int) -> None:
        self.kind, message = _REFUSALS[status]
        super().__init__(status, message)


class InboundMeter:
    """Counters of one connection; beyond a bound they raise Excess."""

    __slots__ = (
        "_behind",
        "_bounds",
        "_fields",
        "_head",
        "_quiet",
        "_stage",
        "_stage_began_at",
        "is_head",
        "is_whole",
        "message_count",
    )  # fmt: skip

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.message_count = 0
        self.is_head, self.is_whole = False, True
        self._head = self._fields = self._quiet = self._behind = 0
        self._stage: ConnectionStage | None = None
        self._stage_began_at = 0.0

    def begin(self, waiting: int) -> None:
        """Begins a message; raises Excess (429) if `waiting`, the others not answered yet, reaches `pipeline_max`."""
        self.message_count += 1
        self.is_head, self.is_whole = True, False
        self._head = self._fields = self._quiet = 0
        if waiting >= self._bounds.pipeline_max:
            raise BoundViolation(429)

    def excess(self, data: bytes) -> int:
        """Status (431) if `data` begins or goes on with a head of more lines than `head_fields`; 0 otherwise.

        Told field by field, they would cost four times as much as the connection that brings them.
        """
        if not self.is_whole and (not self.is_head or data.startswith((b"\r", b"\n"))):
            return 0  # a body, or a head whose end may have begun before
        end = data.find(_HEAD_END, 0, PIECE)
        lines = data.count(b"\n", 0, PIECE if end < 0 else end)
        return 431 if lines > 1 + self._bounds.head_fields else 0

    def url(self, size: int) -> None:
        """Adds `size` bytes of the request target; raises Excess (431) beyond `head_bytes`."""
        self._head += size
        if self._head > self._bounds.head_bytes:
            raise BoundViolation(431)

    def field(self, size: int) -> None:
        """Adds a header field or trailer of `size` bytes; raises Excess (431) beyond `head_fields` or `head_bytes`."""
        self._fields += 1
        self._head += size
        if self._fields > self._bounds.head_fields or self._head > self._bounds.head_bytes:
            raise BoundViolation(431)

    def body(self, size: int, *, is_behind: bool) -> None:
        """Adds bytes of a body; of those behind another, which nobody reads as yet, over BEHIND raise Excess (413)."""
        self._quiet = 0
        if is_behind:
            self._behind += size
            if self._behind > BEHIND:
                raise BoundViolation(413)

    def answered(self) -> None:
        """Resets the bytes behind: a request before them has its answer."""
        self._behind = 0

    def fed(self, size: int) -> bool:
        """Returns whether `size` more bytes, of which the parser may have told nothing, are still within the bounds.

        A value without an end is told at its end only. Counted by the piece, so up to two pieces more may have come.
        """
        if self.is_whole:
            return True
        self._quiet += size
        return self._quiet <= self._bounds.head_bytes + PIECE

    def late(self, stage: ConnectionStage | None, now_s: float) -> Kind | None:
        """The kind of this stage if the connection has stood there for longer than it may."""
        if stage != self._stage:
            self._stage, self._stage_began_at = stage, now_s
        elif stage is not None and now_s - self._stage_began_at > self._allowed_s(stage.kind):
            self._stage = None
            return stage.kind
        return None

    def _allowed_s(self, kind: Kind) -> float:
        bounds = self._bounds
        if kind == "body":
            return bounds.body_timeout_s
        return bounds.head_timeout_s if kind in ("silent", "head") else bounds.write_timeout_s
