"""Contents of bodies: what a request that was refused leaves behind."""

import asyncio
import contextlib
import functools
import gc
import sys
from collections.abc import Iterator

import pytest

from serving.requests.errors import Problem
from serving.requests.options import Limits
from serving.requests.parsing import lookup_from_body, peek_content, pop_content, run_in_thread_if_large

LIMITS = Limits(1_000, 100, 100, 300, 10_000)
BODIES = [b"a" * 1_000, b'{"entities": [1.5], "k": "many"}', b'{"entities": ["u1"], "k": 5} ' * 2]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A service looks for cycles seldom, so what only a collection frees stays for many requests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("text", BODIES)
def test_a_refused_body_is_free_without_a_collection(text: bytes) -> None:
    body = bytes(bytearray(text))
    reference_count = sys.getrefcount(body)
    scope: dict[str, object] = {}

    for read in (peek_content, pop_content):
        with contextlib.suppress(Problem):
            read(scope, body, "json", LIMITS)
    with contextlib.suppress(Problem):
        lookup_from_body({}, body, "json", "user_topk", LIMITS)

    assert sys.getrefcount(body) == reference_count


async def test_a_large_body_that_a_thread_refused_is_free_without_a_collection() -> None:
    body = b"a" * (1 << 20)
    reference_count = sys.getrefcount(body)

    attached = await refused_beside(body)

    assert len(attached) < 1_000  # not the text that was parsed
    # Thread and loop release the body a moment after the outcome is there.
    await asyncio.get_running_loop().shutdown_default_executor()
    assert sys.getrefcount(body) == reference_count


async def refused_beside(body: bytes) -> str:
    """All that the refusal, and what it came from, have attached."""
    try:
        await run_in_thread_if_large(body, functools.partial(pop_content, {}, body, "json", LIMITS))
    except Problem as problem:
        origin = problem.__cause__ or problem.__context__ or Exception()
        return f"{vars(problem)} {vars(origin)}"
    return ""
