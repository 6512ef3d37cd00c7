"""Chunks are decoded as the parser that reads heads decodes them, in whatever pieces they come."""

from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.http1_protocol import CHUNKED_LENGTH, ChunkedBody, ProtocolViolation, body_length

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
BEHIND = b"GET / HTTP/1.1\r\n"


class Judge:
    """What httptools makes of a body."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        """Keep a piece."""
        self.body += body

    def on_message_complete(self) -> None:
        """Note the end."""
        self.is_complete = True


def decode(pieces: list[bytes]) -> tuple[bytes, bytes, bool]:
    """The body, the bytes behind it, and whether it is complete."""
    chunks, body, behind = ChunkedBody(), b"", b""
    for piece in pieces:
        if chunks.is_complete:
            behind += piece
            continue
        part, size = chunks.feed(piece)
        body, behind = body + part, behind + piece[size:]
    return body, behind, chunks.is_complete


def cut(data: bytes, cut_positions: list[int]) -> list[bytes]:
    """`data` in pieces."""
    ends = sorted({0, len(data), *(cut_position % (len(data) + 1) for cut_position in cut_positions)})
    return [data[start:end] for start, end in pairwise(ends)]


SIZES = st.sampled_from(["%x", "%X", "0%x", "000%x", "%x;a", "%x;a=b", '%x;a="b"', '%x;a="b c;";d'])
TRAILERS = st.sampled_from([b"", b"X: y\r\n", b"Connection: close\r\nA:\r\n"])


@given(
    st.lists(st.tuples(SIZES, st.binary(min_size=1, max_size=40) | st.just(b"0\r\n\r\n"))), TRAILERS,
    st.lists(st.integers(0, 2_000), max_size=9),
)  # fmt: skip
def test_chunks_in_pieces_are_one_body(chunks: list[tuple[str, bytes]], trailers: bytes, places: list[int]) -> None:
    chunked_body = b"".join(b"%b\r\n%b\r\n" % ((size % len(data)).encode(), data) for size, data in chunks)
    chunked_body += b"0\r\n" + trailers + b"\r\n"
    judge = Judge()
    httptools.HttpRequestParser(judge).feed_data(HEAD + chunked_body)

    body, behind, is_complete = decode(cut(chunked_body + BEHIND, places))

    assert judge.is_complete
    assert (body, behind, is_complete) == (judge.body, BEHIND, True)


@given(st.binary(max_size=60) | st.text("0123456789abcdefG;\r\n x", max_size=40).map(str.encode), st.integers(0, 60))
def test_bytes_that_the_parser_refuses_are_refused(sent: bytes, place: int) -> None:
    judge = Judge()
    try:
        httptools.HttpRequestParser(judge).feed_data(HEAD + sent)
    except httptools.HttpParserError:
        if judge.is_complete:
            return  # of what stands behind the body
        with pytest.raises(ProtocolViolation):
            # The parser refuses a line where it goes wrong, the decoder where it ends: so end the line and exceed its
            # bound.
            decode([*cut(sent, [place]), b"\n", b"\n" * 9_000])


@pytest.mark.parametrize("malformed_body", [
    b"\r\n", b"x\r\n", b"-1\r\n", b"+1\r\n", b"0x1\r\n", b" 1\r\n", b"1 \r\n", b"1\n", b"1\r\r\n",
    b"1;\x00\r\n", b"1;a\nb\r\n", b"1;\r\n", b"1;;a\r\n", b"1; a\r\n", b"1;a=\r\n", b"1;a b\r\n", b'1;a="b\r\n',
    b"fffffffffffffffff\r\n", b"1\r\nab\r\n", b"1\r\na\n", b"1\r\na\r\r\n", b"0\r\nno colon\r\n", b"0\r\n X: y\r\n",
    b"0\r\nX : y\r\n", b"0\r\nX: a\rb\r\n", b"0\r\nX: y\n", b"0\r\n: y\r\n", b"1;" + b"a" * 9_000,
])  # fmt: skip
def test_what_is_no_chunk_is_refused_in_one_piece_and_in_many(malformed_body: bytes) -> None:
    for pieces in ([malformed_body], [bytes([byte]) for byte in malformed_body]):
        with pytest.raises(ProtocolViolation) as refusal:
            decode(pieces)
        assert refusal.value.status == 400


def test_trailers_without_end_are_refused() -> None:
    with pytest.raises(ProtocolViolation) as refusal:
        decode([b"0\r\n", *[b"a: b\r\n"] * 20_000])
    assert refusal.value.status == 431


@pytest.mark.parametrize(("codings", "expected"), [
    ([b"chunked"], CHUNKED_LENGTH), ([b"Chunked "], CHUNKED_LENGTH), ([b"gzip, chunked"], 501),
    ([b"gzip", b"chunked"], 501),
    ([b"gzip"], 400), ([b"chunked, gzip"], 400), ([b""], 400), ([b"chunked;q=1"], 400),
])  # fmt: skip
def test_the_last_transfer_coding_says_how_long_a_body_is(codings: list[bytes], expected: int) -> None:
    headers = [(b"host", b"a"), *((b"transfer-encoding", coding) for coding in codings)]
    if expected == CHUNKED_LENGTH:
        assert body_length(b"1.1", headers) == CHUNKED_LENGTH
    else:
        with pytest.raises(ProtocolViolation) as refusal:
            body_length(b"1.1", headers)
        assert refusal.value.status == expected
    with pytest.raises(ProtocolViolation):
        body_length(b"1.0", headers)
