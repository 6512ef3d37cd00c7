"""Comparison of two answers, except for a few fields: ages, request ids, times of acceptance, prose."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from tests.contract.side_by_side.decided import (
    EMPTIED_AT,
    FILLED_AT,
    WIDENED_AT,
    is_added_reason,
    is_decided_refusal,
    without_added,
    without_removed,
)
from tests.contract.side_by_side.exchange import Answer

ARROW: Final = "application/vnd.apache.arrow.stream"
MASKED_HEADERS: Final = frozenset({"date", "x-request-id", "server-timing", "content-length", "etag", "retry-after"})
"""Headers whose presence is compared, not their value."""
AGES: Final = frozenset({"age_seconds", "expires_in_seconds", "retry_after_seconds", "seconds"})
"""Names of numbers that say how long ago something was, or how long it takes."""
ACCEPTED_AT: Final = frozenset({"as_of", "position", "fingerprint", "time"})
"""Names of texts that say when an event was accepted, or are hashed from it."""
PROSE_AT: Final = ("body.info.contact.name", ".agreement.why")
"""Ends of the paths of further texts for people."""
PROSE: Final = frozenset({"message", "detail", "sentence", "description", "summary", "title", "version"})
"""Names of texts for people, and of the release."""
MOMENTARY_STALE: Final = frozenset({"events_behind"})
"""Words of `stale` that say how busy the machine is."""

_TEXT, _NUMBER = rb'"(?:[^"\\]|\\.)*"', rb"-?[0-9][0-9.eE+-]*"
_MASKS: Final = re.compile(
    b'"(%b)":%b|"(%b)":%b'
    % ("|".join(sorted(ACCEPTED_AT | PROSE)).encode(), _TEXT, "|".join(sorted(AGES)).encode(), _NUMBER)
)
_STALE: Final = re.compile(rf',"stale":"(?:{"|".join(sorted(MOMENTARY_STALE))})"'.encode())
_MISSING: Final = object()
_SHOWN_CHARS: Final = 300


class Difference(NamedTuple):
    """Path in an answer at which two differ, and the values on either side."""

    path: str
    left_side: object
    right: object

    def __str__(self) -> str:
        return f"{self.path}: {_shorten(self.left_side)} | {_shorten(self.right)}"


def difference(
    left: Answer, right: Answer, *, is_shape: bool = False, is_other_type: bool = False
) -> Difference | None:
    """Return the first difference of two answers or None; with `is_shape`, compare only names and types of fields.

    `is_other_type`: the request says that its body is not JSON.
    """
    if is_decided_refusal(_refusal(left), _refusal(right), is_other_type=is_other_type):
        return None
    if left.status != right.status:
        return Difference(
            "status", f"{left.status} {left.body[:_SHOWN_CHARS]!r}", f"{right.status} {right.body[:_SHOWN_CHARS]!r}"
        )
    if (of_headers := _difference_of_headers(left, right)) is not None:
        return of_headers
    kind = left.header("content-type").partition(";")[0]
    if kind == ARROW:
        return _difference_of_streams(left.body, right.body)
    if kind == "application/json":
        if not is_shape and masked(left.body) == masked(right.body):
            return None
        pair = orjson.loads(left.body or b"null"), orjson.loads(right.body or b"null")
        return next(differences_of_values(*pair, "body", is_shape=is_shape), None)
    # Plain text and HTML pages are prose and may differ.
    return None


def _refusal(answer: Answer) -> tuple[int, Any]:
    """Return the status of an answer and the code of its error, None without one."""
    if answer.status < 400 or answer.header("content-type") != "application/json":
        return answer.status, None
    body = orjson.loads(answer.body or b"null")
    error = body.get("error") if isinstance(body, dict) else None
    return answer.status, error.get("code") if isinstance(error, dict) else None


def masked(body: bytes) -> bytes:
    """Return JSON in which masked fields have one value, and without a momentary `stale`."""
    return _MASKS.sub(rb'"\1\2":0', _STALE.sub(b"", body))


def differences_of_values(
    left: Any, right: Any, path: str, *, is_shape: bool = False, name: str = ""
) -> Iterator[Difference]:
    """Differences of two JSON values: names and their order, types, values to the last bit."""
    # Another test compares the examples of OpenAPI with their schemas.
    if name == "example" or path in WIDENED_AT or path.endswith(PROSE_AT):
        return
    if left is None and isinstance(right, str) and path in FILLED_AT:
        return
    if isinstance(left, str) and right is None and (path, left) in EMPTIED_AT:
        return
    if type(left) is not type(right):
        if not (is_shape and None in (left, right)):
            yield Difference(path, left, right)
    elif isinstance(left, dict):
        left = _without_momentary(without_removed(left, path))
        right = _without_momentary(without_added(left, right, path))
        # The names of counts are words in the order in which they first occurred.
        ordered = sorted if is_shape else list
        if ordered(left) != ordered(right):
            yield Difference(f"{path} (names)", list(left), list(right))
        for key, value in left.items():
            yield from differences_of_values(value, right.get(key), f"{path}.{key}", is_shape=is_shape, name=key)
    elif isinstance(left, list):
        left, right = without_removed(left, path), without_added(left, right, path)
        if not is_shape and len(left) != len(right):
            yield Difference(f"{path} (length)", len(left), len(right))
        for number, pair in enumerate(zip(left, right, strict=False)):
            yield from differences_of_values(*pair, f"{path}[{number}]", is_shape=is_shape, name=name)
    elif name == "scored_at" and abs(left - right) <= 1:
        return  # both services compute the same answer, one before a second ends and one after it
    elif not is_shape and left != right and not _is_masked(name, left):
        yield Difference(path, left, right)


def _is_masked(name: str, value: object) -> bool:
    """True for a value of a masked name and its type: `position` is masked as a text, not as a row of a directory."""
    return name in (ACCEPTED_AT | PROSE if isinstance(value, str) else AGES if isinstance(value, int | float) else ())


def _without_momentary(value: dict[str, Any]) -> dict[str, Any]:
    stale = value.get("stale")
    if isinstance(stale, str) and set(stale.split(",")) <= MOMENTARY_STALE:
        return {key: field for key, field in value.items() if key != "stale"}
    return value


def _difference_of_headers(left: Answer, right: Answer) -> Difference | None:
    sides = [
        [(name, "" if name in MASKED_HEADERS else value) for name, value in answer.headers] for answer in (left, right)
    ]
    return None if sides[0] == sides[1] else Difference("headers", *sides)


def _difference_of_streams(left: bytes, right: bytes) -> Difference | None:
    tables = []
    for body in (left, right):
        with pa.ipc.open_stream(body) as stream:
            tables.append(stream.read_all())
    before, after = tables
    if not before.schema.equals(after.schema, check_metadata=True):
        return Difference("schema", _schema(before), _schema(after))
    if before.num_rows != after.num_rows:
        return Difference("rows", before.num_rows, after.num_rows)
    for name in before.column_names:
        if name in AGES | ACCEPTED_AT or (name == "stale" and _is_momentary(before[name], after[name])):
            continue
        if not before[name].equals(after[name]):
            rows = list(zip(before[name].to_pylist(), after[name].to_pylist(), strict=True))
            differing = next(
                ((row, pair) for row, pair in enumerate(rows) if pair[0] != pair[1]), (0, ("bits", "bits"))
            )
            if name == "reason" and _differ_by_added_reasons(rows, after["approximate"].to_pylist()):
                continue
            return Difference(f"column {name}[{differing[0]}]", *differing[1])
    return None


def _differ_by_added_reasons(rows: Sequence[tuple[Any, Any]], is_approximate: Sequence[Any]) -> bool:
    return all(
        left == right or (left is None and is_added_reason(right, flag))
        for (left, right), flag in zip(rows, is_approximate, strict=True)
    )


def _is_momentary(*columns: pa.ChunkedArray) -> bool:
    return all(
        stale_reason is None or stale_reason in MOMENTARY_STALE
        for column in columns
        for stale_reason in column.to_pylist()
    )


def _schema(table: pa.Table) -> str:
    return f"{table.schema.to_string(show_schema_metadata=True)}"


def _shorten(value: object) -> str:
    text = "(nothing)" if value is _MISSING else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
