"""A lookup of one plain id on the hot route: L1, then one read of L2 with or without company, then the ladder."""

from collections.abc import Callable
from typing import Any

import orjson

from cache.tiers.tiered import Found, Outcome
from serving.fast_lookup.batch import Batches
from serving.fast_lookup.coalescer import Lower, Together
from serving.fast_lookup.single_request import Get
from serving.lookup.service import LookupService
from serving.rendering.json_single import JSON, Unfit, start_of
from serving.requests.models import Ask, Entity
from serving.tracing.request_context import note
from serving.usage.answer_sampling import Pick


class Singles:
    """Answers lookups of one id that the night knows."""

    def __init__(
        self, service: LookupService, batches: Batches, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._watch = service.ladder.watch
        self._batches = batches
        self._clock = clock
        self._together = Together(service, batches, clock)

    async def answer(self, get: Get) -> bytes:
        """The body of the response."""
        live, want = get.holding.live, get.want
        found = self._tiers.peek(live.view, want)
        if found is not None:
            return await self._rendered(get, found)
        together, began = self._together, self._service.timer()
        told = None
        if together.have_time(get) and together.pays():
            told = await together.ask(get)
        outcome = await self._read(get) if told is None else told
        note("stored", self._service.timer() - began, 1)
        return await self._below(get, outcome)

    async def _below(self, get: Get, outcome: Outcome | Lower | bytes) -> bytes:
        if isinstance(outcome, bytes):
            return outcome
        if not isinstance(outcome, Found):
            return await self._lower(get, outcome.reason)
        if outcome.reason is not None:  # a live answer that stands in for the night's
            return await self._lower(get, None)
        return await self._rendered(get, outcome)

    async def _read(self, get: Get) -> Outcome:
        """Reads L2; under a deadline of its own if the request has less time than L2 may take."""
        live, want = get.holding.live, get.want
        if self._together.have_time(get):
            return await self._tiers.get(live.view, want)
        deadline = self._ladder.l2_deadline(get.options, get.started)  # a clock of its own
        return await self._tiers.get(live.view, want, deadline)

    async def _rendered(self, get: Get, found: Found) -> bytes:
        live, asked = get.holding.live, get.asked
        try:
            start = start_of(live, get.table, found, asked.id, get.k)
        except Unfit as unfit:
            if unfit.is_damaged:
                self._tiers.discard(live.view, get.want)
            return await self._lower(get, unfit.reason)
        name = asked.table, asked.raw
        self._ladder.recent.append(name)
        self._metrics.hot(asked.table, found.tier, self._service.timer() - get.started)
        if found.tier == "l2":
            self._watch.read(live.generation, asked.table, get.want.key)
        picks = self._watch.picks
        picks.left -= 1
        if picks.left < 0:
            picks.places(1)
            picks.put(Pick(
                live.generation, *name, found.tier, "batch", self._clock(), get.k, found.record
            ))  # fmt: skip
        marks = self._batches.marks(live)
        if found.tier == "l1" and marks.stale is None:
            self._tiers.keep(live.view, get.want, marks.ready(start, name, get.request))
        return start + marks.end(found.tier, self._clock())

    async def _lower(self, get: Get, reason: str | None) -> bytes:
        """The body with the ladder's answer, from what lies below the tiers."""
        asked = get.asked
        ask = Ask((Entity(asked.table, asked.id, asked.raw, "id"),), get.options)
        answer: dict[str, Any]
        (answer,) = await self._ladder.lookup(get.holding, ask, get.started, (reason,))
        if (stale := self._service.follower.stale) is not None:
            answer["stale"] = stale
        return orjson.dumps(answer, option=JSON)
