"""Whose time is gone before the turn: by headers, query and body, whatever the body's form."""

from typing import Any

import orjson
import pytest

from serving.access.callers import ANYBODY, STRANGER, Caller
from serving.admission.controller import Admission
from serving.admission.gate import DeadlineCheck
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client.calls import write_arrow_ids
from serving.requests.options import Limits
from serving.requests.parsing import HeaderReader
from serving.requests.request_record import CALLER_KEY

LIMITS = Limits(1_000, 100, 100, deadline_ms=300.0, deadline_max_ms=10_000.0)
WAIT_S = 0.5
ARROW = (b"content-type", ARROW_MEDIA_TYPE.encode())


def judged(
    body: bytes | None = None,
    *,
    query: bytes = b"",
    headers: tuple[tuple[bytes, bytes], ...] = (),
    caller: Caller = ANYBODY,
) -> bool:
    """Whether a request that has waited for half a second comes too late."""
    gate = Admission(target_s=0.02, interval_s=0.1, requests_max=1)
    gate.loop_valve.interval_wait = WAIT_S
    scope: dict[str, Any] = {
        "method": "GET" if body is None else "POST", "headers": headers, "query_string": query,
        CALLER_KEY: caller,
    }  # fmt: skip
    is_late = DeadlineCheck(gate, HeaderReader(LIMITS), LIMITS).is_late(scope, body or b"")
    assert gate.shed_counts["late"] == is_late
    return is_late


def make_body(deadline_ms: object) -> bytes:
    return orjson.dumps({"entities": ["u-1"], "deadline_ms": deadline_ms})


def test_who_says_nothing_has_the_usual_deadline() -> None:
    assert judged() and judged(b'{"entities":["u-1"]}') and judged(b"")


@pytest.mark.parametrize(("deadline_ms", "is_late"), [(10, True), (499, True), (501, False)])
def test_a_deadline_counts_wherever_it_stands(deadline_ms: int, is_late: bool) -> None:
    text = str(deadline_ms)
    arrow = write_arrow_ids(["u-1"], {"deadline_ms": text})

    assert judged(make_body(deadline_ms)) == is_late
    assert judged(arrow, headers=(ARROW,)) == is_late
    assert judged(query=b"k=5&deadline_ms=" + text.encode()) == is_late


def test_the_tighter_of_header_and_body_counts() -> None:
    assert judged(make_body(9_000), headers=((b"x-deadline-ms", b"100"),))
    assert not judged(make_body(9_000), headers=((b"x-deadline-ms", b"800"),))


def test_an_id_that_mentions_a_deadline_is_none() -> None:
    assert judged(orjson.dumps({"entities": ["deadline_ms"]}))


@pytest.mark.parametrize("body", [make_body(0), make_body("1"), make_body(True), b'{"deadline_ms":', b"deadline_ms"])
def test_who_is_refused_for_what_it_says_is_not_late(body: bytes) -> None:
    assert not judged(body)
    assert not judged(query=b"deadline_ms=0")
    assert not judged(headers=((b"x-deadline-ms", b"soon"),))
    assert not judged(b"", caller=STRANGER)
