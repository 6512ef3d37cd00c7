"""Parsing of the requests that the hot route answers; None for all it leaves to the other routes. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from cache.format.ids import ID_BYTES_MAX, are_ids
from serving.requests.errors import Problem
from serving.requests.models import Limits, RequestOptions
from serving.requests.options import ARM, query_options
from serving.tracing.observer import TIMING_HEADER

PREFIX = b"/v1/lookup/"
_QUERIES_MAX = 1_024
_QUERY_BYTES_MAX = 256
_DEADLINE_DIGITS_MAX = 9
_BATCH_FIELDS = frozenset({"entities", "k"})
_WATCHED = frozenset({b"x-deadline-ms", b"x-larder-canary-key", ARM, TIMING_HEADER})


class ParsedLookup(NamedTuple):
    """Lookup of one id in one table."""

    table: str
    id: str
    raw: bytes


class IdBatch(NamedTuple):
    """Lookup of many ids in one table; `k` None = all."""

    raws: list[bytes]
    k: int | None


class QueryOptions:
    """The options of a URL by its query, for those that do no more than choose `k`, a deadline and a filter.

    Short ones are remembered: what a caller repeats is short, and no number of others can fill the memory.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._options_by_query: dict[bytes, RequestOptions | None] = {}

    def of(self, query: bytes) -> RequestOptions | None:
        """The options, read as everywhere else, once per distinct query."""
        if len(query) > _QUERY_BYTES_MAX:
            return self._read(query)
        try:
            return self._options_by_query[query]
        except KeyError:
            if len(self._options_by_query) >= _QUERIES_MAX:
                self._options_by_query.clear()
            options = self._options_by_query[query] = self._read(query)
            return options

    def _read(self, query: bytes) -> RequestOptions | None:
        try:
            options = query_options(query, self._limits)
        except Problem:
            return None
        plain_options = RequestOptions(options.deadline_s, options.k, filter=options.filter)
        return options if options == plain_options else None


class HeaderJudge:
    """Judges the headers that matter to a lookup; names come in lower case."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def deadline_s(self, headers: Iterable[tuple[bytes, bytes]]) -> float | None:
        """Deadline in seconds by the request's headers, infinite without one; None: not for the hot route."""
        deadline_s = float("inf")
        for name, value in headers:
            if name not in _WATCHED:
                continue
            if name == b"x-deadline-ms":
                sent_ms = value.isdigit() and len(value) <= _DEADLINE_DIGITS_MAX and int(value)
                if not sent_ms:
                    return None
                deadline_s = min(deadline_s, min(sent_ms, self._limits.deadline_max_ms) / 1000)
            elif name in (
                ARM,
                TIMING_HEADER,
            ) or not (  # ASKED is taken away where the stages are told
                value.isascii() and 0 < len(value) <= ID_BYTES_MAX
            ):
                return None
        return deadline_s


def single(path: bytes) -> ParsedLookup | None:
    """The table and the id of `/v1/lookup/<table>/<id>`."""
    if not path.startswith(PREFIX):
        return None
    table, _, entity = path[len(PREFIX) :].partition(b"/")
    raw = unquote_to_bytes(entity) if b"%" in entity else entity
    # An encoded table is for those who decode it.
    if not 0 < len(raw) <= ID_BYTES_MAX or b"%" in table:
        return None
    try:
        return ParsedLookup(table.decode("ascii"), raw.decode(), raw)
    except UnicodeDecodeError:
        return None


def batch(data: object, longest: int) -> IdBatch | None:
    """Plain text ids, as most batches are, and perhaps `k`, from the JSON of a body."""
    if not isinstance(data, dict) or not data.keys() <= _BATCH_FIELDS:
        return None
    ids, k = data.get("entities"), _k(data)
    if not isinstance(ids, list) or not 1 <= len(ids) <= longest or k == 0:
        return None
    try:
        raws = [entity_id.encode() for entity_id in ids]
    except (AttributeError, UnicodeEncodeError):
        return None
    return IdBatch(raws, k) if are_ids(raws) else None


def _k(data: Mapping[str, Any]) -> int | None:
    """Value of `k`, None if absent; 0 for what is refused elsewhere."""
    k = data.get("k")
    return k if k is None or (type(k) is int and k > 0) else 0


def tighter(options: RequestOptions, deadline_s: float) -> RequestOptions:
    """Options with the tighter of their deadline and the headers'."""
    if deadline_s >= options.deadline_s:
        return options
    return replace(options, deadline_s=deadline_s)
