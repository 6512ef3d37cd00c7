"""A batch of plain ids on the hot route: L1 for all, one pipeline for the rest, the ladder for what neither holds."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from cache.keys import fingerprint, hash_id
from cache.manifest import Table
from cache.outcomes import Found, Outcome, Want
from serving.ask import Ask, Entity, Options
from serving.holding import Holding
from serving.render import JSON, Marks, Unfit, start_of
from serving.routes import Service
from serving.rows import top_lists
from serving.snapshot import Snapshot

_SLICE = 128
"""Answers rendered before others may use the event loop."""


@dataclass(slots=True, eq=False)
class Lookup:
    """One request for `ids` of a table, and the JSON of each answer as it becomes known."""

    holding: Holding
    table: Table
    ids: Sequence[str]
    raws: Sequence[bytes]
    options: Options
    started: float
    texts: list[bytes | None] = field(default_factory=list)


class Batches:
    """Answers whole batches; each entity is resolved on its own."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._clock = clock
        self._marks: Marks | None = None

    async def answer(self, lookup: Lookup) -> bytes:
        """The body of the response."""
        lookup.texts = [None] * len(lookup.ids)
        known, wants = self._known(lookup)
        if len(known) == len(lookup.ids):
            await self._stored(lookup, known, wants)
        else:
            unknown = sorted(set(range(len(lookup.ids))).difference(known))
            # At the same time: what they read travels in one pipeline.
            async with asyncio.TaskGroup() as both:
                both.create_task(self._lower(lookup, unknown, [None] * len(unknown)))
                if known:
                    both.create_task(self._stored(lookup, known, wants))
        return b'{"answers":[%b]}' % b",".join([each for each in lookup.texts if each is not None])

    def _known(self, lookup: Lookup) -> tuple[list[int], list[Want]]:
        """Places of the ids that the night knows and nobody blocks, and what to read for them."""
        live, table = lookup.holding.live, lookup.table
        directory = live.directories[table.entity]
        seed = directory.seed
        hashes = [hash_id(raw, seed) for raw in lookup.raws]
        positions = directory.find_many(np.array(hashes, np.uint64)).tolist()
        known = [place for place, position in enumerate(positions) if position >= 0]
        if live.has_blocked_entities:
            known = [place for place in known if not live.blocks(table, lookup.raws[place])]
        digest = live.digest_without_input(table)
        wants = [
            Want(table, hashes[place], fingerprint(lookup.raws[place]), positions[place], digest)
            for place in known
        ]
        return known, wants

    async def _stored(self, lookup: Lookup, known: list[int], wants: list[Want]) -> None:
        view = lookup.holding.live.view
        deadline = self._ladder.l2_deadline(lookup.options, lookup.started, len(wants))
        outcomes = await self._tiers.get_many(view, wants, deadline)
        for start in range(0, len(known), _SLICE):
            if start:
                await asyncio.sleep(0)
            part = slice(start, start + _SLICE)
            self._render(lookup, known[part], outcomes[part])
        open_ = [at for at, place in enumerate(known) if lookup.texts[place] is None]
        if not open_:
            return
        reasons = [self._singly(lookup, known[at], wants[at], outcomes[at]) for at in open_]
        lower = [at for at, place in enumerate(known) if lookup.texts[place] is None]
        by_at = dict(zip(open_, reasons, strict=True))
        if lower:
            await self._lower(lookup, [known[at] for at in lower], [by_at[at] for at in lower])

    def _render(self, lookup: Lookup, known: list[int], outcomes: Sequence[Outcome]) -> None:
        table, live = lookup.table, lookup.holding.live
        if table.kind != "topk":
            return
        pairs = [
            (place, each)
            for place, each in zip(known, outcomes, strict=True)
            if type(each) is Found and each.reason is None
        ]
        if not pairs:
            return
        marks = self.marks(live)
        k = table.layout.width if lookup.options.k is None else lookup.options.k
        found = [each for _, each in pairs]
        texts = top_lists(
            live,
            table,
            [lookup.ids[place] for place, _ in pairs],
            found,
            k,
            marks.ends(marks.age(self._clock())),
        )
        counts = {"l1": 0, "l2": 0}
        for (place, each), text in zip(pairs, texts, strict=True):
            if text is not None:
                lookup.texts[place] = text
                counts[each.tier] += 1
                self._ladder.recent.append((table.name, lookup.raws[place]))
        seconds = self._service.timer() - lookup.started
        for tier in ("l1", "l2"):
            if counts[tier]:
                self._metrics.hot(table.name, tier, seconds, counts[tier])

    def _singly(self, lookup: Lookup, place: int, want: Want, outcome: Outcome) -> str | None:
        """One that the rows leave out; the reason why the ladder must answer, None also if it need not."""
        live, table = lookup.holding.live, lookup.table
        if type(outcome) is not Found:
            return outcome.reason
        if outcome.reason is not None:
            return None
        k = table.layout.width if lookup.options.k is None else lookup.options.k
        marks = self.marks(live)
        try:
            start = start_of(live, table, outcome, lookup.ids[place], k)
        except Unfit as unfit:
            if unfit.is_damaged:
                self._tiers.discard(live.view, want)
            return unfit.reason
        lookup.texts[place] = start + marks.ends(marks.age(self._clock()))[outcome.tier]
        self._ladder.recent.append((table.name, lookup.raws[place]))
        seconds = self._service.timer() - lookup.started
        self._metrics.hot(table.name, outcome.tier, seconds)
        return None

    async def _lower(
        self, lookup: Lookup, places: list[int], reasons: Sequence[str | None]
    ) -> None:
        table = lookup.table.name
        entities = tuple(
            Entity(table, lookup.ids[place], lookup.raws[place], f"entities[{place}]")
            for place in places
        )
        ask = Ask(entities, lookup.options)
        answers = await self._ladder.lookup(lookup.holding, ask, lookup.started, reasons)
        stale = self._service.follower.stale
        for place, answer in zip(places, answers, strict=True):
            if stale is not None:
                answer["stale"] = stale
            lookup.texts[place] = orjson.dumps(answer, option=JSON)

    def marks(self, live: Snapshot) -> Marks:
        """The marks of answers from `live` at this moment, made once for as long as they hold."""
        found, stale = self._marks, self._service.follower.stale
        if found is None or found.snapshot is not live or found.stale != stale:
            found = self._marks = Marks(live, stale)
        return found
