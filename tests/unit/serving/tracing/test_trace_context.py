"""traceparent as the recommendation has it, and as OpenTelemetry's own propagator reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.tracing.trace_context import Parent, parent_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_one_names_its_trace_and_span() -> None:
    assert parent_of([GOOD.encode()], [b"a=1", b"b=2"]) == Parent(TRACE, SPAN, 1, "a=1,b=2")


@pytest.mark.parametrize(
    "sent",
    [
        "", "00", GOOD[:-1], GOOD + "-more", GOOD.upper(), f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0g", GOOD.replace("-", "_"), GOOD + "\n", "x" * 10_000,
        f"00-{TRACE}-{SPAN}-01é",
    ],
)  # fmt: skip
def test_one_that_is_not_valid_is_ignored(sent: str) -> None:
    assert parent_of([sent.encode()], [b"a=1"]) is None


def test_a_later_version_may_say_more() -> None:
    found = parent_of([f"cc-{TRACE}-{SPAN}-00-what-comes-later".encode()])

    assert found == Parent(TRACE, SPAN, 0) and not found.is_sampled


def test_two_are_as_good_as_none() -> None:
    assert parent_of([GOOD.encode(), GOOD.encode()]) is None


@pytest.mark.parametrize("state", [b"a=" + b"x" * 600, b"\xff"])
def test_a_state_that_cannot_be_passed_on_costs_nobody_the_parent(state: bytes) -> None:
    assert parent_of([GOOD.encode()], [state]) == Parent(TRACE, SPAN, 1)


PIECES = st.sampled_from(["00", "01", "ff", "cc", TRACE, SPAN, "0" * 32, "0" * 16, "g1", "A" * 32])


@given(st.lists(PIECES, min_size=3, max_size=5).map("-".join) | st.just(GOOD))
def test_opentelemetry_reads_the_same(sent: str) -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": [sent]})
    theirs = get_current_span(context).get_span_context()
    ours = parent_of([sent.encode()])

    assert theirs.is_valid == (ours is not None)
    if ours is not None:
        assert (ours.trace_id, ours.span_id) == (
            f"{theirs.trace_id:032x}",
            f"{theirs.span_id:016x}",
        )
        assert ours.flags == theirs.trace_flags
