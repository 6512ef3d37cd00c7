"""A lookup of one plain id on the hot route, by itself: L1, one read of L2, and the ladder for what is not stored."""

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from cache.manifest import Table
from cache.tiered import Found
from serving.ask import Ask, Entity, Options
from serving.batch import Batches
from serving.case import want_in
from serving.holding import Holding
from serving.plan import Single
from serving.render import JSON, Unfit, start_of
from serving.routes import Service


class Get(NamedTuple):
    """One request; `holding` is what it captured, `started` monotonic."""

    holding: Holding
    table: Table
    asked: Single
    options: Options
    started: float
    request: bytes
    """Path and query, by which a ready answer is kept."""

    @property
    def k(self) -> int:
        """Items of the list."""
        return self.table.layout.width if self.options.k is None else self.options.k


class Alone:
    """Reads and renders one record at a time."""

    def __init__(self, service: Service, batches: Batches, clock: Callable[[], float]) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._batches = batches
        self._clock = clock

    async def answer(self, get: Get) -> bytes | None:
        """The body; None for an id that the night does not know or that somebody blocks."""
        live, table, asked = get.holding.live, get.table, get.asked
        if live.blocks(table, asked.raw):
            return None
        want = want_in(live, table, asked.raw)
        if want.position < 0:
            return None
        if (digest := live.digest_without_input(table)) is not None:
            want = want._replace(digest=digest)
        found = self._tiers.peek(live.view, want)
        if found is None:
            if self.has_time(get):
                outcome = await self._tiers.read(live.view, want)
            else:  # a clock of its own
                deadline = self._ladder.l2_deadline(get.options, get.started)
                outcome = await self._tiers.get(live.view, want, deadline)
            if not isinstance(outcome, Found):
                return await self.lower(get, outcome.reason)
            if outcome.reason is not None:  # a live answer that stands in for the night's
                return await self.lower(get, None)
            found = outcome
        try:
            start = start_of(live, table, found, asked.id, get.k)
        except Unfit as unfit:
            if unfit.is_damaged:
                self._tiers.discard(live.view, want)
            return await self.lower(get, unfit.reason)
        name = asked.table, asked.raw
        self._ladder.recent.append(name)
        self._metrics.hot(asked.table, found.tier, self._service.timer() - get.started)
        marks = self._batches.marks(live)
        if found.tier == "l1" and marks.stale is None:
            self._tiers.local.keep(marks.ready(start, name, get.request))
        return start + marks.end(found.tier, self._clock())

    def has_time(self, get: Get) -> bool:
        """Whether a read of L2 that begins now needs no clock but L2's own."""
        service = self._service
        left_s = get.started + get.options.deadline_s - service.timer()
        return left_s >= service.l2_bound_s()

    async def lower(self, get: Get, reason: str | None) -> bytes:
        """From what lies below the tiers."""
        asked = get.asked
        ask = Ask((Entity(asked.table, asked.id, asked.raw, "id"),), get.options)
        answer: dict[str, Any]
        (answer,) = await self._ladder.lookup(get.holding, ask, get.started, (reason,))
        if (stale := self._service.follower.stale) is not None:
            answer["stale"] = stale
        return orjson.dumps(answer, option=JSON)
