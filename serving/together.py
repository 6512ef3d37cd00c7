"""Lookups of one plain id that come in the same turn of the event loop, answered as one batch.

What a batch costs once (a pipeline, a flight, numpy's calls) they share; each keeps its own answer, clock and count.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.columns import Rows
from serving.ask import Options
from serving.batch import Batches, outcome_at
from serving.render import JSON
from serving.resolved import Lookup
from serving.routes import Service
from serving.rows import texts_of
from serving.single import Alone, Get

LEAST = 6
"""In a group: fewer cost less one by one."""

MOST = 128
"""Answers rendered before others may use the event loop."""

TURNS_MAX = 8
"""That a group waits for more while each turn brings some."""

log = logging.getLogger(__name__)


class Lower(NamedTuple):
    """No stored answer: `reason` is what the ladder goes on with."""

    reason: str | None


Told = bytes | Lower | None
"""The body; or from where it comes instead. None: whoever asked goes on alone."""


class _Member(NamedTuple):
    get: Get
    told: asyncio.Future[Told]

    def tell(self, what: Told) -> None:
        if not self.told.done():
            self.told.set_result(what)


class Together:
    """Use it in one event loop only."""

    def __init__(
        self, service: Service, batches: Batches, alone: Alone, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._alone = alone
        self._batches = batches
        self._clock = clock
        self._turn: dict[tuple[int, str, int], list[_Member]] = {}
        self._is_open = False
        self._turns = self._came = self._latest = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def pays(self, under_way: int) -> bool:
        """Whether a request is likely to have company, with so many under way."""
        return under_way >= LEAST or self._latest >= LEAST

    def ask(self, get: Get) -> asyncio.Future[Told]:
        """For a request that has the time that L2 may take."""
        loop = asyncio.get_running_loop()
        if not self._is_open:
            # Runs after every callback that is ready now, so whoever asks in this turn comes along.
            loop.call_soon(self._flush)
            self._is_open = True
        self._came += 1
        told: asyncio.Future[Told] = loop.create_future()
        key = get.holding.live.stamp, get.asked.table, get.k
        members = self._turn.setdefault(key, [])
        members.append(_Member(get, told))
        if len(members) == MOST:
            self._start(self._turn.pop(key))
        return told

    def _flush(self) -> None:
        came, self._came = self._came, 0
        self._turns += 1
        if came and self._turns < TURNS_MAX:  # whoever the next turn brings comes along, too
            asyncio.get_running_loop().call_soon(self._flush)
            return
        turn, self._turn = self._turn, {}
        self._turns, self._is_open = 0, False
        for members in turn.values():
            self._start(members)

    def _start(self, members: list[_Member]) -> None:
        self._latest = len(members)
        if len(members) < LEAST:
            _leave(members)
            return
        task = asyncio.get_running_loop().create_task(self._answer(members))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, members: list[_Member]) -> None:
        try:
            # What was enough when each asked is not if much was sent since: no clock ends the reading of others.
            if all(self._alone.has_time(get) for get, _ in members):
                await self._tell(_lookup(members), members)
        except Exception:  # each goes on alone, and fails alone
            log.exception("answering together failed")
        finally:
            _leave(members)

    async def _tell(self, lookup: Lookup, members: list[_Member]) -> None:
        places, wants = self._batches.known(lookup)
        if len(places) < len(members):  # unknown or blocked: why should they wait?
            for place in set(range(len(members))).difference(places.tolist()):
                members[place].tell(None)
            if not len(places):
                return
        found, is_plain = await self._batches.read(lookup, wants)
        for at in np.flatnonzero(~is_plain).tolist():
            place = int(places[at])
            if members[place].told.done():  # its caller has left
                continue
            answer = self._batches.singly(lookup, place, wants.one(at), outcome_at(found, at))
            told = orjson.dumps(answer, option=JSON) if isinstance(answer, dict) else Lower(answer)
            members[place].tell(told)
        if np.count_nonzero(is_plain):
            self._tell_plain(lookup, members, places, found, is_plain)

    def _tell_plain(
        self,
        lookup: Lookup,
        members: list[_Member],
        places: NDArray[np.int64],
        found: Rows,
        is_plain: NDArray[np.bool_],
    ) -> None:
        live = lookup.holding.live
        own = [members[place] for place in places[is_plain].tolist()]
        is_l2 = found.is_l2[is_plain].tolist()
        marks = self._batches.marks(live)
        ends = marks.ends(marks.age(self._clock()))
        by_tier = ends["l1"], ends["l2"]
        bodies = texts_of(
            live,
            lookup.table,
            [get.asked.id for get, _ in own],
            found.records if len(own) == len(is_plain) else found.records[is_plain],
            lookup.k,
            [by_tier[each] for each in is_l2],
        )
        now = self._service.timer()
        for member, body, each in zip(own, bodies, is_l2, strict=True):
            if member.told.done():  # as above
                continue
            get, tier = member.get, _TIERS[each]
            name = get.asked.table, get.asked.raw
            self._service.ladder.recent.append(name)
            self._service.metrics.hot(name[0], tier, now - get.started)
            if not each and marks.stale is None:
                start = body[: -len(ends["l1"])]
                self._service.tiers.local.keep(marks.ready(start, name, get.request))
            member.told.set_result(body)


_TIERS: tuple[Literal["l1"], Literal["l2"]] = "l1", "l2"


def _lookup(members: Sequence[_Member]) -> Lookup:
    first = members[0].get
    options = Options(min([get.options.deadline_s for get, _ in members]), first.k)
    raws = [get.asked.raw for get, _ in members]
    return Lookup(first.holding, first.table, raws, options, first.started)


def _leave(members: list[_Member]) -> None:
    for member in members:
        member.tell(None)
