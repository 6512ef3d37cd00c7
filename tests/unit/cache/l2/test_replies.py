"""Replies of one length, read where they lie: as the parser would read them, and never beyond."""

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import TierUnavailable
from cache.l2.commands import Frames, frame_stride_bytes
from cache.l2.pool import Pipeline, PipelineConnection
from cache.native import loader


def bulk(*values: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(payload), payload) for payload in values)


def test_every_reply_is_found_and_parts_of_parts_are_the_same_replies() -> None:
    values = [bytes([number]) * 8 for number in range(6)]
    frames = Frames(bulk(*values) + b"more", 6, 8)

    assert list(frames) == frames.payloads() == values
    assert frames.select_range(1, 4).select_range(2, 2).payloads() == values[3:5]
    assert frames.select_range(2, 3)[1] == values[3]
    records = frames.select_range(3, 2).to_records(np.dtype([("first", "u4"), ("second", "u4")]))
    assert records["second"].tolist() == [0x03030303, 0x04040404]
    with pytest.raises(ValueError, match="8 bytes, a record 4"):
        frames.to_records(np.dtype("u4"))
    with pytest.raises(IndexError):
        frames.select_range(3, 4)


@pytest.mark.parametrize("odd_reply", [b"$0\r\n\r\n", b"$9\r\n", b"-ERR no\r\n", b"*", b"$8\r\n12345678xx"])
def test_anything_else_is_seen_as_soon_as_it_begins(odd_reply: bytes) -> None:
    data = bulk(b"a" * 8) + odd_reply

    could_be = loader.kernels.could_be
    assert could_be(bulk(b"a" * 8), 2, 8) and could_be(data[: frame_stride_bytes(8) + 1], 1, 8)
    assert not could_be(data, 3, 8)


class FakeTransport:
    def __init__(self) -> None:
        self.aborted = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def connected() -> tuple[PipelineConnection, FakeTransport]:
    transport = FakeTransport()
    connection: Any = type("Connection", (), {})()
    connection._writer = type("Writer", (), {"transport": transport})()
    return PipelineConnection(connection, lambda _: None), transport


REPLIES = st.one_of(
    st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=5),
    st.lists(st.sampled_from([b"", b"x" * 8, b"$8\r\n", b"\r\n$8\r\n\r\n"]), min_size=1, max_size=5),
)


@given(
    batches=st.lists(st.tuples(REPLIES, st.sampled_from([0, 8])), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_however_replies_are_cut_every_batch_has_its_own(
    batches: list[tuple[list[bytes], int]], cuts: list[int]
) -> None:
    connection, transport = connected()
    landed: list[Any] = []
    for values, length in batches:
        connection.send(Pipeline(b"", len(values), landed.append, length))
    data = b"".join(bulk(*values) for values, _ in batches)

    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if start < end:
            connection.data_received(data[start:end])

    assert [list(replies) for replies in landed] == [values for values, _ in batches]
    assert not transport.aborted and connection.pipelines_in_flight == 0


def test_half_a_batch_is_forgotten_with_its_connection() -> None:
    connection, transport = connected()
    landed: list[Any] = []
    connection.send(Pipeline(b"", 2, landed.append, 8))
    connection.data_received(bulk(b"a" * 8) + b"$8\r")

    connection.abort(TierUnavailable("late", reason="timeout"))

    assert isinstance(landed[0], TierUnavailable) and len(landed) == 1
    assert transport.aborted and connection._incomplete_frames == b""


def test_more_than_was_asked_for_closes_the_connection() -> None:
    connection, transport = connected()
    landed: list[Any] = []
    connection.send(Pipeline(b"", 1, landed.append, 8))

    connection.data_received(bulk(b"a" * 8, b"b" * 8))

    assert list(landed[0]) == [b"a" * 8] and transport.aborted


@pytest.mark.parametrize("raw", [b"%1\r\n*0\r\n:1\r\n", b":9999999999999999999999\r\n", b"?\r\n"])
def test_a_reply_that_no_parser_takes_ends_every_pipeline_of_its_connection(raw: bytes) -> None:
    connection, transport = connected()
    landed: list[Any] = []
    for count in (1, 2):
        connection.send(Pipeline(b"", count, landed.append))

    connection.data_received(raw)

    assert transport.aborted and [type(error) for error in landed] == [TierUnavailable] * 2
