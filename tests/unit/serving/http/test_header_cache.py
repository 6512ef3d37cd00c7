"""What headers allow is judged once, and neither what is long nor what is many is kept."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from serving.access.callers import Callers
from serving.http.lookup_connection import HEADER_BLOCK_BYTES_MAX, HeaderCache

HEADER_BLOCK = b"\r\nHost: a\r\n\r\n"


class FakeFastLookups:
    """Takes everything, and counts how often it was asked."""

    def __init__(self) -> None:
        self.check_count = 0

    def can_use_fast_path(self, _headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether it does."""
        self.check_count += 1
        return True


def blocks(watch: Any = None) -> Any:
    return HeaderCache(SimpleNamespace(request_watch=watch, callers=Callers(answers_without_token=True)))  # type: ignore[arg-type]


def test_headers_are_judged_once() -> None:
    header_cache, fast_lookups = blocks(), FakeFastLookups()
    judgement_before = header_cache.find_judged(fast_lookups, HEADER_BLOCK)
    judgements = [header_cache.judge_and_cache(fast_lookups, HEADER_BLOCK) for _ in range(3)]

    assert (
        judgement_before is None
        and header_cache.find_judged(fast_lookups, HEADER_BLOCK) is judgements[0]
        and fast_lookups.check_count == 1
    )
    assert judgements[0].headers == [(b"host", b"a")] and judgements[0].is_unwatched


def test_headers_that_allow_nothing_are_not_parsed_again() -> None:
    header_cache, fast_lookups = blocks(), FakeFastLookups()
    refused = b"\r\nHost: a\r\nConnection: close\r\n\r\n"

    assert (
        header_cache.judge_and_cache(fast_lookups, refused) is header_cache.find_judged(fast_lookups, refused) is None
    )
    assert fast_lookups.check_count == 0


def test_another_service_judges_anew() -> None:
    header_cache, first_lookups, second_lookups = blocks(), FakeFastLookups(), FakeFastLookups()
    header_cache.judge_and_cache(first_lookups, HEADER_BLOCK)

    assert header_cache.find_judged(second_lookups, HEADER_BLOCK) is None
    header_cache.judge_and_cache(second_lookups, HEADER_BLOCK)
    assert (
        header_cache.find_judged(first_lookups, HEADER_BLOCK) is None
        and header_cache.find_judged(second_lookups, HEADER_BLOCK) is not None
    )


def test_a_bounded_number_is_kept_and_nothing_long() -> None:
    header_cache, fast_lookups = blocks(), FakeFastLookups()
    long = b"\r\nHost: a\r\nA: " + b"b" * HEADER_BLOCK_BYTES_MAX + b"\r\n\r\n"
    assert (
        header_cache.judge_and_cache(fast_lookups, long) is header_cache.find_judged(fast_lookups, long) is None
        and fast_lookups.check_count == 0
    )

    header_blocks = [b"\r\nHost: a\r\nA: %d\r\n\r\n" % number for number in range(1_000)]
    for block in header_blocks:
        assert header_cache.judge_and_cache(fast_lookups, block) is not None
    assert 0 < sum(header_cache.find_judged(fast_lookups, block) is not None for block in header_blocks) <= 256


def test_a_body_of_another_length_changes_one_header_only() -> None:
    header_cache, fast_lookups = blocks(), FakeFastLookups()
    allowed = header_cache.judge_and_cache(fast_lookups, b"\r\nHost: b\r\nContent-Length: 0\r\nC: d\r\n\r\n")

    assert allowed.with_length(b"17") == [(b"host", b"b"), (b"content-length", b"17"), (b"c", b"d")]
    assert allowed.headers[1] == (b"content-length", b"0")


def test_who_watches_says_whether_a_lookup_passes_by() -> None:
    watch = SimpleNamespace(leaves_unobserved=lambda scope: (b"x-request-id", b"1") not in scope["headers"])
    header_cache, fast_lookups = blocks(watch), FakeFastLookups()

    assert header_cache.judge_and_cache(fast_lookups, HEADER_BLOCK).is_unwatched
    assert not header_cache.judge_and_cache(fast_lookups, b"\r\nHost: a\r\nX-Request-Id: 1\r\n\r\n").is_unwatched
