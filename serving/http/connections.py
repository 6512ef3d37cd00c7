"""Bounds on connections: their number, bytes received, unsent bytes of answers, and time without progress."""

import asyncio
import contextlib
import logging
import socket
import struct
from collections import Counter
from collections.abc import Collection
from typing import Any, Final, Literal, NamedTuple

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from cache.config.serving import PeerBounds
from serving.http.http1_protocol import PIECE_BYTES, Http1Protocol, ProtocolViolation

log = logging.getLogger(__name__)

BEHIND_BYTES_MAX = 64 << 10
"""Bytes of further requests that may wait behind an unanswered one."""

SLOW_READER_S: Final = 1.0
"""Seconds that a large answer may wait to be sent before its connection counts as slow. A peer that reads, however far
away, takes megabytes in less time.
"""

_CHECK_INTERVAL_S_MAX = 1.0

_CHECKED_PER_ITERATION = 32
"""Connections checked in one iteration of the loop."""

_REFUSED_CONNECTIONS_MAX = 128
"""Connections beyond `connections_max` that get a refusal; further ones are closed immediately."""

_RESET_LINGER = struct.pack("ii", 1, 0)
_HEAD_END = b"\r\n\r\n"

_REASON_AND_TEXT_BY_STATUS = {
    408: ("head", "the request's head did not arrive in time"),
    413: ("behind", "too many bytes follow a request that is not answered yet"),
    429: ("pipeline", "too many unanswered requests on one connection"),
    431: ("large_head", "the request's head is too large"),
    503: ("full", "too many connections"),
}
"""By status: the reason under which the end of the connection is counted, and the text for the peer."""

StageKind = Literal["silent", "head", "body", "write", "close"]


class Connections:
    """Bound on the number of connections. One timer checks all: one per request would cost as much as its answer."""

    def __init__(self, bounds: PeerBounds) -> None:
        self.bounds = bounds
        self.unread_answers = UnreadAnswers(bounds.answers_bytes)
        self.ended_count_by_reason: Counter[str] = Counter()
        """Counts of ended connections by reason, except those ended by peers or for idleness."""
        self._connections_without_request: dict[Connection, None] = {}  # oldest first
        self._logged_count = 0

    def try_admit_connection(self, connection: "Connection", connection_count: int) -> bool:
        """Return whether a new connection, already counted, may stay; may drop the oldest one without a request."""
        bounds, without_request = self.bounds, self._connections_without_request
        is_full = connection_count > bounds.connections_max
        if is_full or len(without_request) >= bounds.connections_new_max:
            if not without_request:
                return False
            oldest_connection = next(iter(without_request))
            del without_request[oldest_connection]
            self.ended_count_by_reason["unasked"] += 1
            oldest_connection.drop()
        without_request[connection] = None
        return True

    def discard_unasked(self, connection: "Connection") -> None:
        """Remove a connection from those without a request, because it has sent a head or has ended."""
        self._connections_without_request.pop(connection, None)

    @property
    def check_interval_s(self) -> float:
        """Seconds between two checks of a connection."""
        bounds = self.bounds
        shortest_timeout_s = min(bounds.head_timeout_s, bounds.body_timeout_s, bounds.write_timeout_s)
        return min(_CHECK_INTERVAL_S_MAX, shortest_timeout_s / 4)

    async def close_stalled(self, connections: Collection["Connection"], now_s: float) -> None:
        """Check each connection for progress, a few per iteration of the loop."""
        for connection_number, connection in enumerate(list(connections), 1):
            connection.close_if_stalled(now_s)
            if not connection_number % _CHECKED_PER_ITERATION:
                await asyncio.sleep(0)
        self._log_ended()

    def _log_ended(self) -> None:
        """Log ended connections as one line, so that hostile peers cannot fill the log."""
        if (ended_count := self.ended_count_by_reason.total()) > self._logged_count:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.ended_count_by_reason.most_common())
            log.warning("%d connections ended (since the start: %s)", ended_count - self._logged_count, reasons)
            self._logged_count = ended_count


class UnreadAnswers:
    """Connections whose write buffer is full, and their unsent bytes, for one event loop.

    Beyond `unread_bytes_max` slow connections are cut off, those that have waited longest first. If that is not enough,
    `is_full` is True, and no large answer should be started.
    """

    def __init__(self, unread_bytes_max: int) -> None:
        self.unread_bytes_max = unread_bytes_max
        self.cut_off_count = 0
        """Connections cut off since the start."""
        self._waiting_since_by_reader: dict[Connection, float] = {}  # longest wait first
        self._unread_bytes_by_reader: dict[Connection, int] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Unsent bytes, as of the last check of each connection."""
        return self._held_bytes

    def add(self, reader: "Connection", now_s: float) -> None:
        """Count the unsent bytes of a connection whose write buffer is full."""
        self._waiting_since_by_reader.setdefault(reader, now_s)
        self._update_unread_bytes(reader)
        if self._held_bytes > self.unread_bytes_max:
            self._cut_slow(now_s)

    def remove(self, reader: "Connection") -> None:
        """Stop counting a connection that can be written to again, or has ended."""
        if self._waiting_since_by_reader.pop(reader, None) is not None:
            self._held_bytes -= self._unread_bytes_by_reader.pop(reader)

    def is_full(self, now_s: float) -> bool:
        """True if the budget is used up by peers that are not slow enough to be cut off."""
        if self._held_bytes > self.unread_bytes_max:
            self._cut_slow(now_s)
        return self._held_bytes > self.unread_bytes_max

    def _update_unread_bytes(self, reader: "Connection") -> None:
        unread_bytes = reader.unread_bytes()
        self._held_bytes += unread_bytes - self._unread_bytes_by_reader.get(reader, 0)
        self._unread_bytes_by_reader[reader] = unread_bytes

    def _cut_slow(self, now_s: float) -> None:
        for reader in self._waiting_since_by_reader:
            self._update_unread_bytes(reader)
        for reader, full_since_s in list(self._waiting_since_by_reader.items()):
            if self._held_bytes <= self.unread_bytes_max or now_s - full_since_s < SLOW_READER_S:
                return
            self.remove(reader)
            self.cut_off_count += 1
            reader.cut_off()


class ConnectionStage(NamedTuple):
    """Stage of a connection; `progress_counts` changes whenever it progresses."""

    stage_kind: StageKind
    progress_counts: tuple[int, ...] = ()


class BoundViolation(ProtocolViolation):
    """A connection has exceeded a bound; the peer gets the status, and `kind` is counted."""

    def __init__(self, http_status: int) -> None:
        self.kind, message = _REASON_AND_TEXT_BY_STATUS[http_status]
        super().__init__(http_status, message)


class InboundMeter:
    """Counters of one connection; beyond a bound they raise BoundViolation."""

    __slots__ = (
        "_behind_bytes",
        "_bounds",
        "_field_count",
        "_head_bytes",
        "_stage",
        "_stage_began_at",
        "_unreported_bytes",
        "is_in_head",
        "is_message_complete",
        "message_count",
    )  # fmt: skip

    def __init__(self, bounds: PeerBounds) -> None:
        self._bounds = bounds
        self.message_count = 0
        self.is_in_head, self.is_message_complete = False, True
        self._head_bytes = self._field_count = self._unreported_bytes = self._behind_bytes = 0
        self._stage: ConnectionStage | None = None
        self._stage_began_at = 0.0

    def begin_message(self, unanswered_count: int) -> None:
        """Begin a message.

        Raises BoundViolation (429) if `unanswered_count`, the others not answered yet, reaches `pipeline_max`.
        """
        self.message_count += 1
        self.is_in_head, self.is_message_complete = True, False
        self._head_bytes = self._field_count = self._unreported_bytes = 0
        if unanswered_count >= self._bounds.pipeline_max:
            raise BoundViolation(429)

    def head_excess_status(self, received_data: bytes) -> int:
        """Return status 431 if `received_data` begins or continues a head of more lines than `head_fields`; else 0.

        Otherwise parsing the fields would cost four times as much as accepting the connection.
        """
        if not self.is_message_complete and (not self.is_in_head or received_data.startswith((b"\r", b"\n"))):
            return 0  # a body, or a head whose end may have begun in earlier data
        head_end = received_data.find(_HEAD_END, 0, PIECE_BYTES)
        line_count = received_data.count(b"\n", 0, PIECE_BYTES if head_end < 0 else head_end)
        return 431 if line_count > 1 + self._bounds.head_fields else 0

    def count_url(self, target_bytes: int) -> None:
        """Add `target_bytes` bytes of the request target; raise BoundViolation (431) beyond `head_bytes`."""
        self._head_bytes += target_bytes
        if self._head_bytes > self._bounds.head_bytes:
            raise BoundViolation(431)

    def count_field(self, field_bytes: int) -> None:
        """Add a header field or trailer of `field_bytes` bytes.

        Raises BoundViolation (431) beyond `head_fields` or `head_bytes`.
        """
        self._field_count += 1
        self._head_bytes += field_bytes
        if self._field_count > self._bounds.head_fields or self._head_bytes > self._bounds.head_bytes:
            raise BoundViolation(431)

    def count_body(self, body_bytes: int, *, is_after_unanswered: bool) -> None:
        """Add bytes of a body.

        Raises BoundViolation (413) for more than BEHIND_BYTES_MAX of bodies after an unanswered request.
        """
        self._unreported_bytes = 0
        if is_after_unanswered:
            self._behind_bytes += body_bytes
            if self._behind_bytes > BEHIND_BYTES_MAX:
                raise BoundViolation(413)

    def reset_behind(self) -> None:
        """Reset the count of bytes after an unanswered request, which now has its answer."""
        self._behind_bytes = 0

    def is_within_bounds(self, received_bytes: int) -> bool:
        """True if `received_bytes` more bytes, which the parser may not have reported yet, are within the bounds.

        The parser reports a value only at its end. Bytes are counted per piece, so up to two more pieces may be
        accepted.
        """
        if self.is_message_complete:
            return True
        self._unreported_bytes += received_bytes
        return self._unreported_bytes <= self._bounds.head_bytes + PIECE_BYTES

    def stalled_stage_kind(self, connection_stage: ConnectionStage | None, now_s: float) -> StageKind | None:
        """Return the kind of the stage if the connection has been in it for longer than allowed."""
        if connection_stage != self._stage:
            self._stage, self._stage_began_at = connection_stage, now_s
        elif connection_stage is not None and now_s - self._stage_began_at > self._allowed_s(
            connection_stage.stage_kind
        ):
            self._stage = None
            return connection_stage.stage_kind
        return None

    def _allowed_s(self, stage_kind: StageKind) -> float:
        bounds = self._bounds
        if stage_kind == "body":
            return bounds.body_timeout_s
        return bounds.head_timeout_s if stage_kind in ("silent", "head") else bounds.write_timeout_s


class Connection(Http1Protocol):
    """Bounded uvicorn connection; counts open requests, and keeps the idle timer for requests answered past uvicorn.

    Input is parsed within bounds (`InboundMeter`): beyond them the connection stops reading, and ends.

    The fields that each request uses are slots of one object. With thousands of connections an object has left the
    processor's caches by the next request, and each further object would cost more than the lookup.
    """

    __slots__ = (
        "_connections",
        "_ends_after_answer",
        "_had_fast_answer",
        "_inbound_meter",
        "_is_answering_fast",
        "_is_write_buffer_full",
        "_open_count",
        # Uvicorn's fields that every request uses.
        "server_state",
        "timeout_keep_alive_task",
        "transport",
    )  # fmt: skip

    def __init__(self, connections: Connections, *arguments: Any, **keyword_arguments: Any) -> None:
        self._open_count = 0  # requests not read completely + requests not answered, of those that uvicorn handles
        self._had_fast_answer = self._ends_after_answer = self._is_write_buffer_full = False
        self._is_answering_fast = False
        self._connections = connections
        self._inbound_meter = InboundMeter(connections.bounds)
        super().__init__(*arguments, **keyword_arguments)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open the connection as uvicorn does; refuse it with 503 if there are too many."""
        super().connection_made(transport)
        connection_count = len(self.connections)
        if not self._connections.try_admit_connection(self, connection_count):
            self.refuse(BoundViolation(503))
            if connection_count > self._connections.bounds.connections_max + _REFUSED_CONNECTIONS_MAX:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection as uvicorn does, and its requests that were never started."""
        self._connections.discard_unasked(self)
        self._connections.unread_answers.remove(self)
        super().connection_lost(exc)
        if self.pipeline:
            # Requests that were never started and their connection form reference cycles: collecting thousands of them
            # would take the garbage collector tens of milliseconds at a time.
            self.pipeline.clear()
            self.cycle = None  # type: ignore[assignment]  # the newest of them

    def data_received(self, data: bytes) -> None:
        """Refuse input that is visibly too long before any of it is parsed."""
        if not (self.reads_no_more or self._unread_input) and (status := self._inbound_meter.head_excess_status(data)):
            self.refuse(BoundViolation(status))
        super().data_received(data)

    def read_piece(self, data: bytes) -> None:
        """Parse a piece, then check the bytes of an unfinished head."""
        super().read_piece(data)
        if not self.reads_no_more and not self._inbound_meter.is_within_bounds(len(data)):
            self.refuse(BoundViolation(431))

    def on_message_begin(self) -> None:
        """Count a new request, bounded by the pipeline's length, then begin it as uvicorn does."""
        self._open_count += 2
        is_awaited = self.cycle is not None and not self.cycle.response_complete
        self._inbound_meter.begin_message(len(self.pipeline) + is_awaited)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request target within the head's bound, then pass it to uvicorn."""
        self._inbound_meter.count_url(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header field within the head's bounds, then pass it to uvicorn."""
        self._inbound_meter.count_field(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Record that the head is complete and the connection has a request, then continue as uvicorn does."""
        self._inbound_meter.is_in_head = False
        self._connections.discard_unasked(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a piece of a body within the bound on waiting bytes, then pass it to uvicorn.

        The application reads whole bodies, so it is not woken for small pieces except the last.
        """
        self._inbound_meter.count_body(len(body), is_after_unanswered=bool(self.pipeline) or self._is_write_buffer_full)
        cycle = self.cycle
        if cycle is None or cycle.response_complete or len(cycle.body) + len(body) > PIECE_BYTES:
            super().on_body(body)
        else:
            cycle.body += body

    def on_message_complete(self) -> None:
        """Record that the request is read completely, then continue as uvicorn does."""
        if self.is_reading_body:
            return  # the parser reports this after the head of a request with `Upgrade`
        self._open_count -= 1
        self._inbound_meter.is_message_complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Count an answer, then continue as uvicorn does."""
        self._open_count -= 1
        self._inbound_meter.reset_behind()
        super().on_response_complete()
        if self._inbound_meter.is_message_complete and not self._open_count:
            # An idle connection keeps no objects of its last request, which the garbage collector would have to visit.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        """Record that the write buffer is full, then pause as uvicorn does."""
        self._is_write_buffer_full = True
        self._connections.unread_answers.add(self, self.loop.time())
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the write buffer has room again, then resume as uvicorn does."""
        self._is_write_buffer_full = False
        self._connections.unread_answers.remove(self)
        super().resume_writing()

    def drop(self) -> None:
        """Close the connection to make room for another one, unless a request is under way."""
        if not self._is_answering_fast:
            self.transport.abort()

    def close_if_stalled(self, now_s: float) -> None:
        """End the connection if it has been in its current stage for longer than allowed."""
        kind = self._inbound_meter.stalled_stage_kind(self._stage(), now_s)
        if kind is None:
            return
        if kind == "head":
            self.refuse(BoundViolation(408))
            return
        self._connections.ended_count_by_reason[kind] += 1
        if kind in ("write", "close"):
            self._reset()
        else:
            self.transport.close()

    def unread_bytes(self) -> int:
        """Return the bytes of answers that are not sent yet."""
        return self.transport.get_write_buffer_size()

    def cut_off(self) -> None:
        """End the connection immediately, because others need the memory of its unsent answers."""
        self._connections.ended_count_by_reason["unread"] += 1
        self._reset()

    def _reset(self) -> None:
        """Reset the connection: otherwise the kernel would keep unsent bytes for minutes."""
        peer_socket = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # fails without a free file descriptor
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_LINGER)
        self.transport.abort()

    def _stage(self) -> ConnectionStage | None:
        """Return the stage if the peer has to act next; None if the application or the idle timer has."""
        is_closing = self.transport.is_closing()
        if is_closing or self._is_write_buffer_full:
            unsent_bytes = self.transport.get_write_buffer_size()
            return ConnectionStage("close" if is_closing else "write", (unsent_bytes >> 16,))
        if self._is_answering_fast or self.is_discarding:
            return None
        if not self._open_count:
            return ConnectionStage("silent") if self.timeout_keep_alive_task is None else None
        if self.is_awaited or self._inbound_meter.is_message_complete:
            return None
        return ConnectionStage(
            "head" if self._inbound_meter.is_in_head else "body", (self._inbound_meter.message_count,)
        )

    @property
    def is_awaited(self) -> bool:
        """True if a request is not answered yet."""
        return self._is_answering_fast or super().is_awaited

    def refuse(self, violation: ProtocolViolation) -> None:
        """Count the end of a connection that exceeds a bound, then refuse its next request."""
        if isinstance(violation, BoundViolation) and not (self.reads_no_more or self.transport.is_closing()):
            self._connections.ended_count_by_reason[violation.kind] += 1
        super().refuse(violation)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. Fast answers do not restart the timer, which would cost as much as the answer."""
        if self._had_fast_answer or self._is_answering_fast:
            self._start_idle_clock()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Shut down as uvicorn does; if a request is being answered past uvicorn, after its answer."""
        if self._is_answering_fast:
            self._ends_after_answer = True
        else:
            super().shutdown()

    def _respond(self, start: Message, body: bytes) -> None:
        headers = [*self.server_state.default_headers, *start["headers"]]
        closes = b"connection" in dict(headers)
        if self._ends_after_answer and not closes:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[start["status"]], *lines, b"\r\n", body)))
        self._finish_request()
        if closes or self._ends_after_answer:
            self.close_in_stages()

    def _finish_request(self) -> None:
        self.server_state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self._start_idle_clock()
        self._had_fast_answer = True

    def _start_idle_clock(self) -> None:
        self._had_fast_answer = False
        self._connections.discard_unasked(self)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
