"""An inspector of both tiers, for somebody who only looks: nothing is filled, moved or counted."""

import asyncio
import time
from collections.abc import Callable
from operator import itemgetter
from typing import cast

from cache.errors import TierUnavailable
from cache.format.records.layout import is_answer_of
from cache.l2.commands import L2Result, Overlay, PageRead
from cache.l2.data_plane import DataPlane
from cache.tiers.addressing import reads_of
from cache.tiers.checks import judge, live_key, overlay_entry
from cache.tiers.l1 import LocalKey
from cache.tiers.results import (
    MISS_BY_REASON,
    Hit,
    Miss,
    MissReason,
    ReadResult,
    RecordKey,
    View,
    unavailable,
    unsound,
)
from cache.tiers.tiered import TieredCache

_PAGE_S = 3.0
"""Seconds that a whole page may take, which has megabytes where a record has hundreds of bytes."""


class TierInspector:
    """An inspector whose reads of records are real ones: they count for the breaker, and fail as any read does."""

    def __init__(
        self, tiers: TieredCache, remote: DataPlane, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._local = tiers.local
        self._negative = tiers.negative
        self._remote = remote
        self._timer = timer

    def l1(self, view: View, record_key: RecordKey) -> ReadResult | None:
        """The outcome of a look at L1; None if it holds nothing of this entity."""
        key = LocalKey(view.generation, record_key.table.name, record_key.key)
        entry = self._local.inspect(key)
        if entry is not None:
            return judge(entry, record_key, "l1")
        if record_key.position < 0 and key in self._negative:
            return MISS_BY_REASON[MissReason.NEGATIVE]
        return None

    def find_stand_in(self, view: View, record_key: RecordKey) -> ReadResult | None:
        """The live answer that stands in while a page is out of reach, if one is kept."""
        if record_key.position < 0 or record_key.digest is None:
            return None
        key = LocalKey(view.generation, record_key.table.name, record_key.key)
        entry = self._local.inspect(live_key(key, record_key.digest))
        return None if entry is None else judge(entry, record_key, "l1")

    async def record(self, view: View, record_key: RecordKey) -> ReadResult:
        """The record of L1, else the outcome of a read of L2."""
        outcome = self.l1(view, record_key)
        return outcome if isinstance(outcome, Hit) else await self.l2(view, record_key)

    async def l2(self, view: View, record_key: RecordKey) -> ReadResult:
        """The outcome of a read of L2."""
        asked_at = self._timer()
        answer: L2Result = await self._remote.submit(reads_of(view, (record_key,)), itemgetter(0))
        if isinstance(answer, TierUnavailable):
            return unavailable(answer)
        if record_key.position < 0:
            if answer is None:
                return MISS_BY_REASON[MissReason.NOT_IN_GENERATION]
            entry = overlay_entry(record_key, cast(Overlay, answer), asked_at)
            return entry if isinstance(entry, Miss) else judge(entry, record_key, "l2")
        if not isinstance(answer, bytes):
            return MISS_BY_REASON[MissReason.PAGE_MISSING]
        if not is_answer_of(answer, record_key.fingerprint):
            return MISS_BY_REASON[unsound(answer, record_key.fingerprint)]
        return Hit(answer, "l2", False, None)

    async def page(self, read: PageRead) -> bytes | Miss:
        """A whole page, or why it cannot be had."""
        try:
            async with asyncio.timeout(_PAGE_S):
                page_payload = await self._remote.page(read)
        except TierUnavailable as error:
            return unavailable(error)
        except TimeoutError:
            return MISS_BY_REASON[MissReason.L2_TIMEOUT]
        return MISS_BY_REASON[MissReason.PAGE_MISSING] if page_payload is None else page_payload
