"""Record of one request while it is answered: id, trace, and times of its stages."""

import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

CALLER_KEY = "larder.caller"
"""Key in the scope of a request for its caller, whose `name` may be logged."""

_TRACEPARENT_PATTERN = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACEPARENT_BYTES_MAX = 512

_TRACESTATE_BYTES_MAX = 512
"""Bytes of tracestate that must at least be passed on; a longer tracestate is dropped."""


class StageTime(NamedTuple):
    """Seconds in one stage, its monotonic end, and its number of entities (0: not counted)."""

    stage_name: str
    ended_at: float
    stage_seconds: float
    entity_count: int


class ParentSpan(NamedTuple):
    """Span of the caller; `tracestate` is its tracestate as sent, combined."""

    trace_id: str
    span_id: str
    trace_flags: int
    tracestate: str = ""

    @property
    def is_sampled(self) -> bool:
        """True if the caller records this trace."""
        return bool(self.trace_flags & 1)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Record of one request: `request_started_at` is monotonic; `request_id` is its name in logs and to its caller.

    Ready answers, the fastest path, have no record.
    """

    request_started_at: float
    request_id: str
    parent: ParentSpan | None = None
    stage_times: list[StageTime] = field(default_factory=list)
    http_status: int = 0
    last_body_piece: bytes = b""
    """Last piece of the response's body, without a copy."""
    caller_name: str = ""
    """Name of the sent token, never the token; empty without a valid token, or if the service has no tokens."""
    trace_and_span_ids: tuple[str, str] | None = None
    """Trace id and span id, once there is a span."""
    is_request_over: bool = False

    def end(self) -> None:
        """End the record: a connection opened during the request keeps a reference to this context."""
        self.is_request_over, self.last_body_piece = True, b""

    def log_ids(self) -> dict[str, str]:
        """Return the fields of a log line that identify the request and its trace."""
        id_by_field = {"request_id": self.request_id}
        if self.trace_and_span_ids is not None:
            id_by_field["trace_id"], id_by_field["span_id"] = self.trace_and_span_ids
        elif self.parent is not None:
            id_by_field["trace_id"] = self.parent.trace_id
        return id_by_field

    def seconds_by_stage(self) -> dict[str, float]:
        """Return the seconds by stage, in the order in which they first ended."""
        seconds_by_stage: dict[str, float] = {}
        for stage in self.stage_times:
            seconds_by_stage[stage.stage_name] = seconds_by_stage.get(stage.stage_name, 0.0) + stage.stage_seconds
        return seconds_by_stage


CURRENT_RECORD: ContextVar[RequestRecord | None] = ContextVar("larder_seen", default=None)
"""Record of the request that this task answers; inherited by tasks that it starts."""


def current_record() -> RequestRecord | None:
    """Return the record of the current request, if any."""
    request_record = CURRENT_RECORD.get()
    return None if request_record is None or request_record.is_request_over else request_record


def note_stage(stage_name: str, stage_seconds: float, entity_count: int = 0) -> None:
    """Record that one stage of the current request, if any, has ended."""
    if (request_record := current_record()) is not None:
        request_record.stage_times.append(StageTime(stage_name, time.monotonic(), stage_seconds, entity_count))


class RequestFacts(NamedTuple):
    """Facts of a request for log and spans; the entity's id only if that is switched on."""

    http_method: str
    route: str
    table_name: str | None
    entity_id: str | None


def parse_parent(traceparents: Iterable[bytes], tracestates: Iterable[bytes] = ()) -> ParentSpan | None:
    """Parse the caller's span by W3C Trace Context (https://www.w3.org/TR/trace-context/); None starts a new trace.

    Returns None for a missing, repeated or invalid traceparent.
    """
    traceparent_values = list(traceparents)
    if len(traceparent_values) != 1 or len(traceparent_values[0]) > _TRACEPARENT_BYTES_MAX:
        return None
    traceparent_match = _TRACEPARENT_PATTERN.fullmatch(traceparent_values[0].strip(b" \t"))
    if traceparent_match is None:
        return None
    version, trace_id, span_id, flags, version_suffix = traceparent_match.groups()
    # Later versions may have further fields after the flags; version 00 has none.
    if version == b"ff" or (version == b"00" and version_suffix is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    tracestate = b",".join(tracestates)
    tracestate_text = (
        tracestate.decode("ascii") if tracestate.isascii() and len(tracestate) <= _TRACESTATE_BYTES_MAX else ""
    )
    return ParentSpan(trace_id.decode(), span_id.decode(), int(flags, 16), tracestate_text)
