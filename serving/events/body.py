"""Bodies of POST /v1/events: one event that is no JSON does not take the others of its request along. Pure."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

import orjson

from serving.requests.errors import Problem

_HEAD: Final = re.compile(rb'\s*\{\s*"events"\s*:\s*\[')
_TAIL: Final = re.compile(rb"\s*\}\s*")
# Possessive: a text that is never closed is read once, and then ends the search.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)


class UnreadableEvent(NamedTuple):
    """An event of a body that is no JSON, and why; nothing of it is kept, since nobody knows whose it is."""

    reason: str


def read_separately(body: bytes, events_max: int) -> dict[str, object] | None:
    """The body with each event read alone; None where they cannot be told apart, or each is JSON.

    At most `most + 1` events are read. `body` as a whole is no JSON.
    """
    try:
        pieces = list(islice(_pieces(body), events_max + 1))
    except _NoListError:
        return None
    events = [_read(piece) for piece in pieces]
    return (
        {"events": events} if any(isinstance(event, UnreadableEvent) for event in events) else None
    )


class _NoListError(ValueError):
    """A body that is no object with a list of events alone, or whose texts and brackets do not end."""


def _pieces(body: bytes) -> Iterator[bytes]:
    """The text of each event of the list; raises _NoListError, perhaps behind the first of them."""
    head = _HEAD.match(body)
    if head is None:
        raise _NoListError
    start, depth = head.end(), 0
    for token in _TOKEN.finditer(body, start):
        symbol = token[0]
        if symbol == b'"':
            raise _NoListError
        if symbol in b"[{":
            depth += 1
        elif symbol in b"]}":
            depth -= 1
        if depth < 0 or (depth == 0 and symbol == b","):
            piece = body[start : token.start()]
            if not piece.strip():
                raise _NoListError
            yield piece
            start = token.end()
        if depth < 0:
            if symbol != b"]" or not _TAIL.fullmatch(body, start):
                raise _NoListError
            return
    raise _NoListError


def _read(piece: bytes) -> object:
    try:
        return orjson.loads(piece)
    except orjson.JSONDecodeError as error:
        return UnreadableEvent(str(error))


def read_body_of_events(problem: Problem, body: bytes, events_max: int) -> object:
    """The contents of a body that was refused with `problem`; raises it where its events cannot be told apart."""
    contents = read_separately(body, events_max) if problem.reason == "invalid_json" else None
    if contents is None:
        raise problem
    return contents
