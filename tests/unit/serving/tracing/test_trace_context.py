"""traceparent as the recommendation has it, and as OpenTelemetry's own propagator reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.requests.request_record import ParentSpan, parse_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_one_names_its_trace_and_span() -> None:
    assert parse_parent([GOOD.encode()], [b"a=1", b"b=2"]) == ParentSpan(TRACE, SPAN, 1, "a=1,b=2")


@pytest.mark.parametrize(
    "traceparent",
    [
        "", "00", GOOD[:-1], GOOD + "-more", GOOD.upper(), f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0g", GOOD.replace("-", "_"), GOOD + "\n", "x" * 10_000,
        f"00-{TRACE}-{SPAN}-01é",
    ],
)  # fmt: skip
def test_one_that_is_not_valid_is_ignored(traceparent: str) -> None:
    assert parse_parent([traceparent.encode()], [b"a=1"]) is None


def test_a_later_version_may_say_more() -> None:
    parent = parse_parent([f"cc-{TRACE}-{SPAN}-00-what-comes-later".encode()])

    assert parent == ParentSpan(TRACE, SPAN, 0) and not parent.is_sampled


def test_two_are_as_good_as_none() -> None:
    assert parse_parent([GOOD.encode(), GOOD.encode()]) is None


@pytest.mark.parametrize("state", [b"a=" + b"x" * 600, b"\xff"])
def test_a_state_that_cannot_be_passed_on_costs_nobody_the_parent(state: bytes) -> None:
    assert parse_parent([GOOD.encode()], [state]) == ParentSpan(TRACE, SPAN, 1)


PIECES = st.sampled_from(["00", "01", "ff", "cc", TRACE, SPAN, "0" * 32, "0" * 16, "g1", "A" * 32])


@given(st.lists(PIECES, min_size=3, max_size=5).map("-".join) | st.just(GOOD))
def test_opentelemetry_reads_the_same(sent: str) -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": [sent]})
    theirs = get_current_span(context).get_span_context()
    parsed_parent = parse_parent([sent.encode()])

    assert theirs.is_valid == (parsed_parent is not None)
    if parsed_parent is not None:
        assert (parsed_parent.trace_id, parsed_parent.span_id) == (f"{theirs.trace_id:032x}", f"{theirs.span_id:016x}")
        assert parsed_parent.trace_flags == theirs.trace_flags
