"""W3C Trace Context (https://www.w3.org/TR/trace-context/): what a caller says its request is part of. Pure."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LENGTH_MAX = 512
_STATE_BYTES_MAX = 512
"""Bytes of tracestate that have to be passed on at least; what is longer is left out whole."""


class ParentSpan(NamedTuple):
    """The caller's span; `state` is its tracestate as sent, combined."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        """True if the caller records this trace."""
        return bool(self.flags & 1)


def parent_of(
    traceparents: Iterable[bytes], tracestates: Iterable[bytes] = ()
) -> ParentSpan | None:
    """The parent; None where there is none, more than one, or one that is not valid: then a trace starts anew."""
    header_values = list(traceparents)
    if len(header_values) != 1 or len(header_values[0]) > _LENGTH_MAX:
        return None
    traceparent_match = _TRACEPARENT.fullmatch(header_values[0].strip(b" \t"))
    if traceparent_match is None:
        return None
    version, trace_id, span_id, flags, more = traceparent_match.groups()
    # A later version may say more after the flags; this one does not.
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    state = b",".join(tracestates)
    state_text = state.decode("ascii") if state.isascii() and len(state) <= _STATE_BYTES_MAX else ""
    return ParentSpan(trace_id.decode(), span_id.decode(), int(flags, 16), state_text)
