"""A reply is refused for what it announces before room is made for it, and any other is read as hiredis reads it."""

import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import hiredis
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.l2.resp import BoundedReader, ReplyBounds
from cache.native import loader, pure
from tests.forged_redis import ABSURD


@pytest.fixture(params=["compiled", "pure"], autouse=True, scope="module")
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs every test with what is compiled and with what stands in for it."""
    with patch.object(loader, "kernels", loader.load_kernels({}) if request.param == "compiled" else pure):
        yield


BOUNDS = ReplyBounds(elements_max=1_024, payload_bytes_max=1 << 20)
_MORE = object()

SCALARS = st.one_of(
    st.binary(max_size=40).map(lambda payload: b"$%d\r\n%b\r\n" % (len(payload), payload)),
    st.sampled_from([b"*", b"$", b"%", b"*9\r\n", b"$9\r\n*9999999\r\n", b"\r\n*99999999\r\n"]).map(
        lambda payload: b"$%d\r\n%b\r\n" % (len(payload), payload)
    ),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number),
    st.text("ab *$%\r", max_size=90).map(
        lambda text: b"+%b\r\n" % text.replace("\r", "").encode()
    ),
    st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"*0\r\n", b"-ERR no\r\n"]),
    st.just(b"=7\r\ntxt:abc\r\n"),
)  # fmt: skip


def _encode_array(replies: list[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(replies), b"".join(replies))


REPLIES = st.recursive(SCALARS, lambda children: st.lists(children, max_size=4).map(_encode_array), max_leaves=12)


def read(reader: hiredis.Reader, pieces: list[bytes]) -> list[Any]:
    """All replies in what came by the piece; errors of replies as their text."""
    replies: list[Any] = []
    for piece in pieces:
        reader.feed(piece)
        while (reply := reader.gets()) is not _MORE:
            replies.append(reply)
    return [repr(reply) for reply in replies]


def cut(data: bytes, offsets: list[int]) -> list[bytes]:
    """`data` cut at these places, as far as it has them."""
    offsets = sorted({offset % (len(data) + 1) for offset in offsets})
    return [data[start:end] for start, end in zip([0, *offsets], [*offsets, len(data)], strict=True)]


@pytest.mark.parametrize("forged", ABSURD)
def test_an_absurd_count_is_refused_before_room_is_made_for_it(forged: bytes) -> None:
    for offset in range(len(forged)):
        reader = BoundedReader(BOUNDS, notEnoughData=_MORE)
        tracemalloc.start()
        try:
            with pytest.raises(hiredis.ProtocolError, match="announces more than 1024 elements"):
                read(reader, cut(forged, [offset]))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_lists_within_lists_count_together() -> None:
    reader = BoundedReader(BOUNDS)
    reader.feed(b"*1000\r\n" + b"*1\r\n:1\r\n" * 24)

    with pytest.raises(hiredis.ProtocolError, match="announces"):
        reader.feed(b"*1\r\n:1\r\n")


def test_replies_behind_one_another_count_alone() -> None:
    reader = BoundedReader(BOUNDS, notEnoughData=_MORE)

    assert len(read(reader, [_encode_array([b":1\r\n"] * 1_024)] * 20)) == 20


def test_a_payload_beyond_the_bound_is_refused_by_its_header() -> None:
    with pytest.raises(hiredis.ProtocolError, match="1048576 bytes"):
        BoundedReader(BOUNDS).feed(b"$1048577\r\n")


def test_a_long_line_in_pieces_is_read() -> None:
    reader = BoundedReader(BOUNDS, notEnoughData=_MORE)

    assert read(reader, [b"+" + b"a" * 500, b"b" * 500 + b"\r", b"\n", b":1\r\n"]) == [
        repr(b"a" * 500 + b"b" * 500),
        "1",
    ]


@settings(deadline=None)
@given(replies=st.lists(REPLIES, max_size=6), offsets=st.lists(st.integers(0, 2_000), max_size=6))
@example(replies=[b"$3\r\nabc\r\n", b"*-1\r\n"], offsets=[1, 4, 5, 8, 9])
def test_other_replies_are_read_as_hiredis_reads_them_wherever_they_are_cut(
    replies: list[bytes], offsets: list[int]
) -> None:
    data = b"".join(replies)
    bounded = BoundedReader(BOUNDS, notEnoughData=_MORE)

    assert read(bounded, cut(data, offsets)) == read(hiredis.Reader(notEnoughData=_MORE), [data])


@settings(deadline=None)
@given(data=st.data(), replies=st.lists(REPLIES, max_size=4), forged=st.sampled_from(ABSURD[:5]))
def test_an_absurd_count_is_found_wherever_it_stands(data: st.DataObject, replies: list[bytes], forged: bytes) -> None:
    """Where hiredis has not refused what stands before it already."""
    offsets = data.draw(st.lists(st.integers(0, 2_000), max_size=6))
    depth = data.draw(st.integers(0, 4))
    forged_stream = b"".join(replies) + b"*1\r\n" * depth + forged

    with pytest.raises(hiredis.ProtocolError, match="announces"):
        read(BoundedReader(BOUNDS, notEnoughData=_MORE), cut(forged_stream, offsets))


def test_a_part_of_a_buffer_is_read_as_redis_py_hands_it_over() -> None:
    reader = BoundedReader(BOUNDS, notEnoughData=_MORE)
    reader.feed(bytearray(b"$3\r\nabc\r\n*99999999\r\n"), 0, 9)

    assert reader.gets() == b"abc" and reader.gets() is _MORE
