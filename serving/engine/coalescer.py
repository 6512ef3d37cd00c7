"""Coalescer of single lookups: those of one iteration of the event loop become one read of L2.

They share the fixed cost of a batch (a pipeline, a flight, numpy's calls); each keeps its own answer, clock and count.
32 lookups in flight take 0.63 to 0.70 of the time that they take one by one; 8 gain nothing (`GROUP_SIZE_MIN`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.model.filter_mask import FilterMask
from cache.tiers.reads import ReadResult, RecordKey, RecordKeys, Rows
from serving.engine.answer_observer import AnswerSample
from serving.engine.batch_lookup import BatchLookups, BatchRequest, read_result_at
from serving.engine.entity import PendingAnswer, build_plain_pending
from serving.engine.rendering.json_answers import answer_texts
from serving.engine.service import LookupService
from serving.generations.served_set import ServedGenerations
from serving.requests.answers import STORED_SOURCES, Source
from serving.requests.models import RequestedEntity
from serving.requests.options import RequestOptions
from serving.requests.parsing import ParsedLookup

log = logging.getLogger(__name__)

GROUP_SIZE_MIN = 8
"""Lookups in a group at least: fewer cost less one by one."""

GROUP_SIZE_MAX = 128
"""Answers rendered before others may use the event loop."""

ITERATIONS_MAX = 4
"""Turns of the event loop that a group waits for more while each brings some."""

GroupResult = bytes | ReadResult | None
"""Rendered body, or the read result if the record is no plain answer; None: look the id up alone."""


class SingleRequest(NamedTuple):
    """Parsed request: `served` are its captured generations, `record_key` the nightly key, `started` is monotonic."""

    served: ServedGenerations
    table: Table
    lookup: ParsedLookup
    record_key: RecordKey
    options: RequestOptions
    started: float
    request: bytes
    """Path and query, by which a ready answer is kept."""
    is_plain: bool
    """True if a record of the night may answer it."""
    filter_mask: FilterMask | None = None
    """Items that pass its filter; None without one."""
    events: bytes | None = None
    """Events in memory of a user with this id when it came, as they were kept."""

    @property
    def k(self) -> int:
        """Number of items of the list: as requested, else the table's width."""
        return self.table.layout.width if self.options.k is None else self.options.k

    @property
    def pending_answer(self) -> PendingAnswer:
        """The request as the ladder has it."""
        single_lookup = self.lookup
        entity = RequestedEntity(single_lookup.table, single_lookup.id, single_lookup.raw, "id")
        return build_plain_pending(self.served.live, self.table, self.k, self.record_key, entity)


class _GroupMember(NamedTuple):
    get: SingleRequest
    result: asyncio.Future[GroupResult]

    def resolve(self, group_result: GroupResult) -> None:
        if not self.result.done():
            self.result.set_result(group_result)


class GetCoalescer:
    """Coalescer of single lookups into batches; for one event loop only."""

    def __init__(
        self, service: LookupService, batches: BatchLookups, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._batches = batches
        self._clock = clock
        self._members_by_key: dict[tuple[int, str, int], list[_GroupMember]] = {}
        self._is_open, self._l2_due_at = False, 0.0
        self._arrivals = self._previous_arrivals = self._iterations = self._expected = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def has_time(self, get: SingleRequest) -> bool:
        """Returns whether a read of L2 that begins in this turn needs no clock but L2's own for the request."""
        if not self._is_open:  # else told by the first request of the turn
            self._l2_due_at = self._service.timer() + self._service.l2_bound_s()
        return get.started + get.options.deadline_s >= self._l2_due_at

    def _has_time_for_all(self, members: list[_GroupMember]) -> bool:
        l2_ends_at = self._service.timer() + self._service.l2_bound_s()
        return min([get.started + get.options.deadline_s for get, _ in members]) >= l2_ends_at

    def note_arrival(self) -> bool:
        """Count a request; return True if recent iterations were busy enough for grouping to save time."""
        if not self._is_open:
            # Runs after every callback that is ready now, so whoever asks in this turn comes along.
            asyncio.get_running_loop().call_soon(self._flush)
            self._is_open = True
        self._arrivals += 1
        return self.is_busy

    @property
    def is_busy(self) -> bool:
        """True if recent iterations had enough requests for a group; counts nothing."""
        return self._expected >= GROUP_SIZE_MIN

    def join(self, get: SingleRequest) -> asyncio.Future[GroupResult]:
        """Returns the future result of a request that is counted and has the time that L2 may take."""
        result_future: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        key = get.served.live.stamp, get.lookup.table, get.k
        members = self._members_by_key.setdefault(key, [])
        members.append(_GroupMember(get, result_future))
        if len(members) == GROUP_SIZE_MAX:
            self._start(self._members_by_key.pop(key))
        return result_future

    def _flush(self) -> None:
        self._iterations += 1
        if self._arrivals > self._previous_arrivals and self._iterations < ITERATIONS_MAX:
            self._previous_arrivals = self._arrivals
            asyncio.get_running_loop().call_soon(self._flush)  # whoever comes next comes along, too
            return
        members_by_key, self._members_by_key = self._members_by_key, {}
        # Callers come in waves: a small one between large ones says little.
        self._expected, self._is_open = max(self._arrivals, self._expected // 2), False
        self._arrivals = self._previous_arrivals = self._iterations = 0
        for members in members_by_key.values():
            self._start(members)

    def _start(self, members: list[_GroupMember]) -> None:
        if len(members) < GROUP_SIZE_MIN:
            _release(members)
            return
        task = asyncio.get_running_loop().create_task(self._answer(members))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, members: list[_GroupMember]) -> None:
        try:
            # What was enough when each asked is not if much was sent since: no clock ends the reading of others.
            if self._has_time_for_all(members):
                await self._resolve_group(_group_lookup(members), members)
        except Exception:  # each goes on alone, and fails alone
            log.exception("answering together failed")
        finally:
            _release(members)

    async def _resolve_group(self, lookup: BatchRequest, members: list[_GroupMember]) -> None:
        record_keys = _build_record_keys(lookup, members)
        read_rows, is_plain = await self._batches.read(lookup, record_keys)
        for index in np.flatnonzero(~is_plain).tolist():
            members[index].resolve(read_result_at(read_rows, index))
        if np.count_nonzero(is_plain):
            self._resolve_plain(lookup, members, read_rows, is_plain)

    def _resolve_plain(
        self,
        lookup: BatchRequest,
        members: list[_GroupMember],
        read_rows: Rows,
        is_plain: NDArray[np.bool_],
    ) -> None:
        live = lookup.served.live
        plain_members = [members[index] for index in np.flatnonzero(is_plain).tolist()]
        is_l2 = read_rows.is_l2[is_plain].tolist()
        rows = (
            read_rows.records
            if len(plain_members) == len(is_plain)
            else read_rows.records[is_plain]
        )
        static_tail = self._batches.get_static_tail(live)
        ends = static_tail.ends(static_tail.age(self._clock()))
        by_tier = ends[Source.L1], ends[Source.L2]
        bodies = answer_texts(
            live,
            lookup.table,
            [get.lookup.id for get, _ in plain_members],
            rows,
            lookup.k,
            [by_tier[is_from_l2] for is_from_l2 in is_l2],
        )
        now_s, watch = self._service.timer(), self._service.ladder.watch
        sampler, read = watch.sampler, list[int | bytes]()
        for at, (member, body, is_from_l2) in enumerate(
            zip(plain_members, bodies, is_l2, strict=True)
        ):
            if member.result.done():  # its caller has left
                continue
            get, tier = member.get, STORED_SOURCES[is_from_l2]
            name = get.lookup.table, get.lookup.raw
            self._service.ladder.recent.append(name)
            self._service.metrics.count_fast_answers(name[0], tier, now_s - get.started)
            if not is_from_l2 and static_tail.stale is None:
                start = body[: -len(ends[Source.L1])]
                is_facet = get.table.is_facet
                ready = static_tail.ready(
                    start, name, get.request, get.events, by_attributes=is_facet
                )
                self._service.tiers.keep(live.view, get.record_key, ready)
            member.result.set_result(body)
            if is_from_l2:
                read.append(get.record_key.key)
            sampler.countdown -= 1
            if sampler.countdown < 0:
                sampler.draw_indices(1)
                record = rows[at].tobytes()
                sampler.put(AnswerSample(
                    live.generation, *name, tier, "batch", self._clock(), lookup.k, record
                ))  # fmt: skip
        if read:
            watch.count_reads(live.generation, lookup.table.name, read)


def _group_lookup(members: Sequence[_GroupMember]) -> BatchRequest:
    first = members[0].get
    options = RequestOptions(min([get.options.deadline_s for get, _ in members]), first.k)
    raws = [get.lookup.raw for get, _ in members]
    return BatchRequest(first.served, first.table, raws, options, first.started)


def _build_record_keys(lookup: BatchRequest, members: Sequence[_GroupMember]) -> RecordKeys:
    record_keys = [get.record_key for get, _ in members]
    return RecordKeys(
        lookup.table,
        [cast(int, record_key.key) for record_key in record_keys],
        np.array([record_key.fingerprint for record_key in record_keys], np.uint64),
        np.array([record_key.position for record_key in record_keys], np.int64),
        record_keys[0].digest,
    )


def _release(members: list[_GroupMember]) -> None:
    for member in members:
        member.resolve(None)
