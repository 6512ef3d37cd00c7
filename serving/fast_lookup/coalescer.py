"""Lookups of one plain id that come in the same turn of the event loop, answered as one batch.

What a batch costs once (a pipeline, a flight, numpy's calls) they share; each keeps its own answer, clock and count.
32 lookups in flight take 0.63 to 0.70 of the time that they take one by one; 8 gain nothing (`LEAST`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cache.tiers.batches import Rows, Wants
from cache.tiers.results import Outcome
from serving.answers.sources import STORED, Source
from serving.fast_lookup.batch import Batches, outcome_at
from serving.fast_lookup.single_request import Get
from serving.lookup.service import LookupService
from serving.rendering.batch_result import Lookup
from serving.rendering.json_batch import texts_of
from serving.requests.models import RequestOptions
from serving.usage.answer_sampling import Pick

LEAST = 8
"""Lookups in a group at least: fewer cost less one by one."""

MOST = 128
"""Answers rendered before others may use the event loop."""

TURNS_MAX = 4
"""Turns of the event loop that a group waits for more while each brings some."""

log = logging.getLogger(__name__)


Told = bytes | Outcome | None
"""The body; or how the read of the tiers ended, where that is no plain answer. None: whoever asked goes on alone."""


class _Member(NamedTuple):
    get: Get
    told: asyncio.Future[Told]

    def tell(self, group_result: Told) -> None:
        if not self.told.done():
            self.told.set_result(group_result)


class Together:
    """Coalescer of single lookups into batches; for one event loop only."""

    def __init__(
        self, service: LookupService, batches: Batches, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._batches = batches
        self._clock = clock
        self._turn: dict[tuple[int, str, int], list[_Member]] = {}
        self._is_open, self._until = False, 0.0
        self._came = self._seen = self._turns = self._expected = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def have_time(self, get: Get) -> bool:
        """Returns whether a read of L2 that begins in this turn needs no clock but L2's own for the request."""
        if not self._is_open:  # else told by the first request of the turn
            self._until = self._service.timer() + self._service.l2_bound_s()
        return get.started + get.options.deadline_s >= self._until

    def _still_have_time(self, members: list[_Member]) -> bool:
        l2_ends_at = self._service.timer() + self._service.l2_bound_s()
        return min([get.started + get.options.deadline_s for get, _ in members]) >= l2_ends_at

    def pays(self) -> bool:
        """Counts one more request; returns whether it is likely to have company: as many came together of late."""
        if not self._is_open:
            # Runs after every callback that is ready now, so whoever asks in this turn comes along.
            asyncio.get_running_loop().call_soon(self._flush)
            self._is_open = True
        self._came += 1
        return self.is_busy

    @property
    def is_busy(self) -> bool:
        """True if as many requests as make a group came together of late; counts nothing."""
        return self._expected >= LEAST

    def ask(self, get: Get) -> asyncio.Future[Told]:
        """Returns the future result of a request that is counted and has the time that L2 may take."""
        result_future: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        key = get.holding.live.stamp, get.asked.table, get.k
        members = self._turn.setdefault(key, [])
        members.append(_Member(get, result_future))
        if len(members) == MOST:
            self._start(self._turn.pop(key))
        return result_future

    def _flush(self) -> None:
        self._turns += 1
        if self._came > self._seen and self._turns < TURNS_MAX:
            self._seen = self._came
            asyncio.get_running_loop().call_soon(self._flush)  # whoever comes next comes along, too
            return
        members_by_key, self._turn = self._turn, {}
        # Callers come in waves: a small one between large ones says little.
        self._expected, self._is_open = max(self._came, self._expected // 2), False
        self._came = self._seen = self._turns = 0
        for members in members_by_key.values():
            self._start(members)

    def _start(self, members: list[_Member]) -> None:
        if len(members) < LEAST:
            _leave(members)
            return
        task = asyncio.get_running_loop().create_task(self._answer(members))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, members: list[_Member]) -> None:
        try:
            # What was enough when each asked is not if much was sent since: no clock ends the reading of others.
            if self._still_have_time(members):
                await self._tell(_lookup(members), members)
        except Exception:  # each goes on alone, and fails alone
            log.exception("answering together failed")
        finally:
            _leave(members)

    async def _tell(self, lookup: Lookup, members: list[_Member]) -> None:
        record_keys = _wants(lookup, members)
        read_rows, is_plain = await self._batches.read(lookup, record_keys)
        for index in np.flatnonzero(~is_plain).tolist():
            members[index].tell(outcome_at(read_rows, index))
        if np.count_nonzero(is_plain):
            self._tell_plain(lookup, members, read_rows, is_plain)

    def _tell_plain(
        self,
        lookup: Lookup,
        members: list[_Member],
        read_rows: Rows,
        is_plain: NDArray[np.bool_],
    ) -> None:
        live = lookup.holding.live
        plain_members = [members[index] for index in np.flatnonzero(is_plain).tolist()]
        is_l2 = read_rows.is_l2[is_plain].tolist()
        rows = (
            read_rows.records
            if len(plain_members) == len(is_plain)
            else read_rows.records[is_plain]
        )
        static_tail = self._batches.marks(live)
        ends = static_tail.ends(static_tail.age(self._clock()))
        by_tier = ends[Source.L1], ends[Source.L2]
        bodies = texts_of(
            live,
            lookup.table,
            [get.asked.id for get, _ in plain_members],
            rows,
            lookup.k,
            [by_tier[is_from_l2] for is_from_l2 in is_l2],
        )
        now_s, watch = self._service.timer(), self._service.ladder.watch
        sampler, read = watch.picks, list[int | bytes]()
        for at, (member, body, is_from_l2) in enumerate(
            zip(plain_members, bodies, is_l2, strict=True)
        ):
            if member.told.done():  # its caller has left
                continue
            get, tier = member.get, STORED[is_from_l2]
            name = get.asked.table, get.asked.raw
            self._service.ladder.recent.append(name)
            self._service.metrics.hot(name[0], tier, now_s - get.started)
            if not is_from_l2 and static_tail.stale is None:
                start = body[: -len(ends[Source.L1])]
                is_facet = get.table.is_facet
                ready = static_tail.ready(
                    start, name, get.request, get.events, by_attributes=is_facet
                )
                self._service.tiers.keep(live.view, get.want, ready)
            member.told.set_result(body)
            if is_from_l2:
                read.append(get.want.key)
            sampler.left -= 1
            if sampler.left < 0:
                sampler.places(1)
                record = rows[at].tobytes()
                sampler.put(Pick(
                    live.generation, *name, tier, "batch", self._clock(), lookup.k, record
                ))  # fmt: skip
        if read:
            watch.read_many(live.generation, lookup.table.name, read)


def _lookup(members: Sequence[_Member]) -> Lookup:
    first = members[0].get
    options = RequestOptions(min([get.options.deadline_s for get, _ in members]), first.k)
    raws = [get.asked.raw for get, _ in members]
    return Lookup(first.holding, first.table, raws, options, first.started)


def _wants(lookup: Lookup, members: Sequence[_Member]) -> Wants:
    record_keys = [get.want for get, _ in members]
    return Wants(
        lookup.table,
        [cast(int, record_key.key) for record_key in record_keys],
        np.array([record_key.fingerprint for record_key in record_keys], np.uint64),
        np.array([record_key.position for record_key in record_keys], np.int64),
        record_keys[0].digest,
    )


def _leave(members: list[_Member]) -> None:
    for member in members:
        member.tell(None)
