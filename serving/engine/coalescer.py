"""Coalescer of single lookups: the lookups of one iteration of the event loop become one read of L2.

They share the fixed cost of a batch (a pipeline, a flight, numpy's calls); each has its own answer, timing and count.
32 lookups in flight take 0.63 to 0.70 of the time of separate lookups; 8 gain nothing (`GROUP_SIZE_MIN`).
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
from serving.engine.entity import PendingAnswer, build_plain_pending_answer
from serving.engine.rendering.json_answers import answer_texts
from serving.engine.service import LookupService
from serving.generations.served_set import ServedGenerations
from serving.requests.answers import STORED_SOURCES, Source
from serving.requests.models import RequestedEntity
from serving.requests.options import RequestOptions
from serving.requests.parsing import ParsedLookup

log = logging.getLogger(__name__)

GROUP_SIZE_MIN = 8
"""Smallest number of lookups in a group; fewer are cheaper one by one."""

GROUP_SIZE_MAX = 128
"""Largest number of lookups in a group, whose answers are rendered without yielding to the event loop."""

ITERATIONS_MAX = 4
"""Iterations of the event loop that a group waits for further lookups, as long as each iteration brings some."""

GroupResult = bytes | ReadResult | None
"""Rendered body, or the read result if the record is no plain answer; None: look the id up alone."""


class SingleRequest(NamedTuple):
    """Parsed GET; `served` were captured, `record_key` is the nightly key, `request_started_at` is monotonic."""

    served: ServedGenerations
    table: Table
    lookup: ParsedLookup
    record_key: RecordKey
    options: RequestOptions
    request_started_at: float
    request_target: bytes
    """Path and query, the key of a ready answer."""
    may_use_nightly_record: bool
    """True if a nightly record may answer the request."""
    filter_mask: FilterMask | None = None
    """Items that pass the request's filter; None without one."""
    packed_user_events: bytes | None = None
    """Packed newer events of a user with this id at the time of the request, the object itself."""

    @property
    def k(self) -> int:
        """Number of items of the list: as requested, else the table's width."""
        return self.table.layout.width if self.options.k is None else self.options.k

    @property
    def pending_answer(self) -> PendingAnswer:
        """The pending answer for the ladder."""
        single_lookup = self.lookup
        entity = RequestedEntity(single_lookup.table, single_lookup.id, single_lookup.raw_id, "id")
        return build_plain_pending_answer(self.served.live, self.table, self.k, self.record_key, entity)


class _GroupMember(NamedTuple):
    single_request: SingleRequest
    result_future: asyncio.Future[GroupResult]

    def resolve(self, group_result: GroupResult) -> None:
        if not self.result_future.done():
            self.result_future.set_result(group_result)


class GetCoalescer:
    """Groups single lookups into batches; for one event loop only."""

    def __init__(self, service: LookupService, batches: BatchLookups, clock: Callable[[], float]) -> None:
        self._service = service
        self._batches = batches
        self._clock = clock
        self._members_by_key: dict[tuple[int, str, int], list[_GroupMember]] = {}
        self._is_iteration_open, self._l2_due_at = False, 0.0
        self._arrival_count = self._previous_arrival_count = self._iteration_count = self._expected_arrivals = 0
        self._group_tasks: set[asyncio.Task[None]] = set()

    def has_time_for_l2(self, single_request: SingleRequest) -> bool:
        """Return whether the request's deadline is later than L2's own for a read that starts in this iteration."""
        if not self._is_iteration_open:  # else computed by the first request of the iteration
            self._l2_due_at = self._service.monotonic_clock() + self._service.l2_bound_s()
        return single_request.request_started_at + single_request.options.deadline_s >= self._l2_due_at

    def _has_time_for_group(self, members: list[_GroupMember]) -> bool:
        l2_ends_at = self._service.monotonic_clock() + self._service.l2_bound_s()
        return (
            min(
                [single_request.request_started_at + single_request.options.deadline_s for single_request, _ in members]
            )
            >= l2_ends_at
        )

    def note_arrival(self) -> bool:
        """Count a request; return True if recent iterations were busy enough for grouping to save time."""
        if not self._is_iteration_open:
            # Runs after all callbacks that are ready now, so all requests of this iteration join.
            asyncio.get_running_loop().call_soon(self._start_groups)
            self._is_iteration_open = True
        self._arrival_count += 1
        return self.is_busy

    @property
    def is_busy(self) -> bool:
        """True if recent iterations had enough requests for a group; counts nothing."""
        return self._expected_arrivals >= GROUP_SIZE_MIN

    def join(self, single_request: SingleRequest) -> asyncio.Future[GroupResult]:
        """Return the future result of a request that `note_arrival` counted and that `has_time_for_l2`."""
        result_future: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        group_key = single_request.served.live.stamp, single_request.lookup.table, single_request.k
        members = self._members_by_key.setdefault(group_key, [])
        members.append(_GroupMember(single_request, result_future))
        if len(members) == GROUP_SIZE_MAX:
            self._start_group(self._members_by_key.pop(group_key))
        return result_future

    def _start_groups(self) -> None:
        self._iteration_count += 1
        if self._arrival_count > self._previous_arrival_count and self._iteration_count < ITERATIONS_MAX:
            self._previous_arrival_count = self._arrival_count
            asyncio.get_running_loop().call_soon(self._start_groups)  # requests of the next iteration join, too
            return
        members_by_key, self._members_by_key = self._members_by_key, {}
        # Requests arrive in waves, so a small wave lowers the expectation only by half.
        self._expected_arrivals, self._is_iteration_open = (
            max(self._arrival_count, self._expected_arrivals // 2),
            False,
        )
        self._arrival_count = self._previous_arrival_count = self._iteration_count = 0
        for members in members_by_key.values():
            self._start_group(members)

    def _start_group(self, members: list[_GroupMember]) -> None:
        if len(members) < GROUP_SIZE_MIN:
            _release_to_single_reads(members)
            return
        task = asyncio.get_running_loop().create_task(self._answer_group(members))
        self._group_tasks.add(task)
        task.add_done_callback(self._group_tasks.discard)

    async def _answer_group(self, members: list[_GroupMember]) -> None:
        try:
            # Checked again: L2's bound may have grown since the requests joined, and a group's read has no deadline of
            # its own.
            if self._has_time_for_group(members):
                await self._resolve_group(_group_lookup(members), members)
        except Exception:  # each request continues, and fails, by itself
            log.exception("answering together failed")
        finally:
            _release_to_single_reads(members)

    async def _resolve_group(self, lookup: BatchRequest, members: list[_GroupMember]) -> None:
        record_keys = _build_record_keys(lookup, members)
        read_rows, plain_mask = await self._batches.read_rows(lookup, record_keys)
        for index in np.flatnonzero(~plain_mask).tolist():
            members[index].resolve(read_result_at(read_rows, index))
        if np.count_nonzero(plain_mask):
            self._resolve_plain(lookup, members, read_rows, plain_mask)

    def _resolve_plain(
        self, lookup: BatchRequest, members: list[_GroupMember], read_rows: Rows, plain_mask: NDArray[np.bool_]
    ) -> None:
        live = lookup.served.live
        plain_members = [members[index] for index in np.flatnonzero(plain_mask).tolist()]
        l2_flags = read_rows.l2_row_mask[plain_mask].tolist()
        plain_rows = read_rows.records if len(plain_members) == len(plain_mask) else read_rows.records[plain_mask]
        static_tail = self._batches.get_static_tail(live)
        end_by_source = static_tail.answer_end_by_tier(static_tail.age_json(self._clock()))
        ends_by_tier = end_by_source[Source.L1], end_by_source[Source.L2]
        answer_bodies = answer_texts(
            live,
            lookup.table,
            [single_request.lookup.id for single_request, _ in plain_members],
            plain_rows,
            lookup.k,
            [ends_by_tier[is_from_l2] for is_from_l2 in l2_flags],
        )
        now_s, observer = self._service.monotonic_clock(), self._service.ladder.observer
        sampler, read_keys = observer.sampler, list[int | bytes]()
        for row_index, (member, answer_body, is_from_l2) in enumerate(
            zip(plain_members, answer_bodies, l2_flags, strict=True)
        ):
            if member.result_future.done():  # its caller has left
                continue
            single_request, tier = member.single_request, STORED_SOURCES[is_from_l2]
            entity_name = single_request.lookup.table, single_request.lookup.raw_id
            self._service.ladder.recent_names.append(entity_name)
            self._service.metrics.count_fast_answers(entity_name[0], tier, now_s - single_request.request_started_at)
            if not is_from_l2 and static_tail.stale_reason is None:
                answer_start = answer_body[: -len(end_by_source[Source.L1])]
                is_facet = single_request.table.is_facet
                ready_answer = static_tail.build_ready_answer(
                    answer_start,
                    entity_name,
                    single_request.request_target,
                    single_request.packed_user_events,
                    depends_on_item_attributes=is_facet,
                )
                self._service.tiers.keep(live.view, single_request.record_key, ready_answer)
            member.result_future.set_result(answer_body)
            if is_from_l2:
                read_keys.append(single_request.record_key.hash_or_digest)
            sampler.countdown -= 1
            if sampler.countdown < 0:
                sampler.draw_indices(1)
                record = plain_rows[row_index].tobytes()
                sampler.put(AnswerSample(
                    live.generation, *entity_name, tier, "batch", self._clock(), lookup.k, record
                ))  # fmt: skip
        if read_keys:
            observer.count_reads(live.generation, lookup.table.name, read_keys)


def _group_lookup(members: Sequence[_GroupMember]) -> BatchRequest:
    first_request = members[0].single_request
    options = RequestOptions(min([single_request.options.deadline_s for single_request, _ in members]), first_request.k)
    entity_ids = [single_request.lookup.raw_id for single_request, _ in members]
    return BatchRequest(
        first_request.served, first_request.table, entity_ids, options, first_request.request_started_at
    )


def _build_record_keys(lookup: BatchRequest, members: Sequence[_GroupMember]) -> RecordKeys:
    record_keys = [single_request.record_key for single_request, _ in members]
    return RecordKeys(
        lookup.table,
        [cast(int, record_key.hash_or_digest) for record_key in record_keys],
        np.array([record_key.fingerprint for record_key in record_keys], np.uint64),
        np.array([record_key.directory_position for record_key in record_keys], np.int64),
        record_keys[0].input_digest,
    )


def _release_to_single_reads(members: list[_GroupMember]) -> None:
    for member in members:
        member.resolve(None)
