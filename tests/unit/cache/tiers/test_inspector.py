"""Who looks at a whole page does it beside the wires that readers wait for."""

import asyncio
from typing import Any

import pytest

from cache.errors import TierUnavailable
from cache.l2.commands import PageRead
from cache.tiers.reads import Miss, MissReason
from serving.explain.explainer import TierInspector
from tests.fakes import FakeRemote

READ = PageRead("g", "t", 3, 0, 8 << 20)


class Paged(FakeRemote):
    """L2 whose wires must not be used."""

    def __init__(self, page: bytes | TierUnavailable | None = None, hangs: bool = False) -> None:
        super().__init__()
        self._page, self._hangs = page, hangs

    def submit(self, *_: Any) -> Any:
        raise AssertionError("8 MiB on a wire, within the deadline of a record")

    async def page(self, read: PageRead) -> bytes | None:
        assert read == READ
        if self._hangs:
            await asyncio.Event().wait()
        if isinstance(self._page, TierUnavailable):
            raise self._page
        return self._page


def looking(remote: Paged) -> TierInspector:
    tiers: Any = type("Tiers", (), {"local_tier": None, "negative_cache": ()})()
    return TierInspector(tiers, remote)


async def test_a_whole_page_does_not_travel_with_records() -> None:
    assert await looking(Paged(b"page")).read_page(READ) == b"page"


@pytest.mark.parametrize(
    ("remote", "reason"),
    [
        (Paged(None), MissReason.PAGE_MISSING),
        (Paged(TierUnavailable("gone", reason="connection")), MissReason.L2_DOWN),
        (Paged(hangs=True), MissReason.L2_TIMEOUT),
    ],
)
async def test_a_page_that_cannot_be_had_says_why_within_its_time(
    remote: Paged, reason: MissReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.explain.explainer._PAGE_TIMEOUT_S", 0.01)

    miss = await looking(remote).read_page(READ)

    assert isinstance(miss, Miss) and miss.reason is reason
