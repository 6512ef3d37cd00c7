"""What headers allow is judged once, and neither what is long nor what is many is kept."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from serving.access.callers import Callers
from serving.fast_http.header_cache import BLOCK_BYTES_MAX, Blocks

PLAIN = b"\r\nHost: a\r\n\r\n"


class Hot:
    """Takes everything, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def takes(self, _headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether it does."""
        self.asked += 1
        return True


def blocks(watch: Any = None) -> Any:
    return Blocks(SimpleNamespace(watch=watch, callers=Callers(is_open=True)))  # type: ignore[arg-type]


def test_headers_are_judged_once() -> None:
    known, hot = blocks(), Hot()
    before = known.of(hot, PLAIN)
    found = [known.judged(hot, PLAIN) for _ in range(3)]

    assert before is None and known.of(hot, PLAIN) is found[0] and hot.asked == 1
    assert found[0].headers == [(b"host", b"a")] and found[0].is_unwatched


def test_headers_that_allow_nothing_are_not_parsed_again() -> None:
    known, hot = blocks(), Hot()
    refused = b"\r\nHost: a\r\nConnection: close\r\n\r\n"

    assert known.judged(hot, refused) is known.of(hot, refused) is None
    assert hot.asked == 0


def test_another_service_judges_anew() -> None:
    known, one, other = blocks(), Hot(), Hot()
    known.judged(one, PLAIN)

    assert known.of(other, PLAIN) is None
    known.judged(other, PLAIN)
    assert known.of(one, PLAIN) is None and known.of(other, PLAIN) is not None


def test_a_bounded_number_is_kept_and_nothing_long() -> None:
    known, hot = blocks(), Hot()
    long = b"\r\nHost: a\r\nA: " + b"b" * BLOCK_BYTES_MAX + b"\r\n\r\n"
    assert known.judged(hot, long) is known.of(hot, long) is None and hot.asked == 0

    many = [b"\r\nHost: a\r\nA: %d\r\n\r\n" % each for each in range(1_000)]
    for each in many:
        assert known.judged(hot, each) is not None
    assert 0 < sum(known.of(hot, each) is not None for each in many) <= 256


def test_a_body_of_another_length_changes_one_header_only() -> None:
    known, hot = blocks(), Hot()
    allowed = known.judged(hot, b"\r\nHost: b\r\nContent-Length: 0\r\nC: d\r\n\r\n")

    assert allowed.with_length(b"17") == [(b"host", b"b"), (b"content-length", b"17"), (b"c", b"d")]
    assert allowed.headers[1] == (b"content-length", b"0")


def test_who_watches_says_whether_a_lookup_passes_by() -> None:
    watch = SimpleNamespace(leaves=lambda scope: (b"x-request-id", b"1") not in scope["headers"])
    known, hot = blocks(watch), Hot()

    assert known.judged(hot, PLAIN).is_unwatched
    assert not known.judged(hot, b"\r\nHost: a\r\nX-Request-Id: 1\r\n\r\n").is_unwatched
