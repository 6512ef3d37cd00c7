"""A batch of plain ids on the hot route: L1 for all, one pipeline for the rest, the ladder for what neither holds."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.ids import fingerprints, hash_ids
from cache.format.item_bytes import Named
from cache.tiers.batches import RecordKeys, Rows
from cache.tiers.results import Hit, ReadResult, RecordKey, Tier
from serving.admission.work_pacer import go_on
from serving.answers.sources import STORED_SOURCES, Source
from serving.generations.snapshot import Snapshot
from serving.lookup.answer_builder import RequestContext
from serving.lookup.entity import PendingAnswer, build_plain_pending
from serving.lookup.service import LookupService
from serving.rendering.answer_fields import JSON, AnswerJson
from serving.rendering.arrow_rows import items_of, resolved_stream
from serving.rendering.batch_result import BatchRequest, ResolvedBatch
from serving.rendering.json_batch import plain_record_mask, texts_of
from serving.rendering.json_single import StaticTail
from serving.requests.errors import Problem
from serving.requests.models import RequestedEntity
from serving.tracing.request_context import note
from serving.usage.answer_sampling import AnswerSample

_SLICE = 128
"""Answers rendered before others may use the event loop."""


class BatchLookups:
    """Answers whole batches; each entity is resolved on its own."""

    def __init__(self, service: LookupService, clock: Callable[[], float]) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._watch = service.ladder.watch
        self._clock = clock
        self._static_tail: StaticTail | None = None

    async def answer(self, lookup: BatchRequest) -> bytes:
        """The body of the response as JSON."""
        resolved = await self.resolve(lookup)
        texts: list[bytes] = []
        for start in range(0, len(resolved.answer_indices), _SLICE):
            if start:
                await self._go_on(lookup)
            texts += self._texts(lookup, resolved, slice(start, start + _SLICE))
        if resolved.answers:
            by_place = dict(zip(resolved.answer_indices.tolist(), texts, strict=True))
            for request_index, answer in resolved.answers.items():
                by_place[request_index] = orjson.dumps(answer, option=JSON)
            texts = [by_place[request_index] for request_index in range(len(lookup.raws))]
        return b'{"answers":[%b]}' % b",".join(texts)

    async def stream(self, lookup: BatchRequest) -> bytes:
        """The body of the response as an Arrow IPC stream."""
        resolved = await self.resolve(lookup)
        items: list[Named] = []
        for start in range(0, len(resolved.answer_indices), _SLICE):
            if start:
                await self._go_on(lookup)
            items.append(items_of(lookup, resolved, slice(start, start + _SLICE)))
        stale = self._service.follower.stale
        return resolved_stream(lookup, resolved, items, self._clock(), stale)

    async def _go_on(self, lookup: BatchRequest) -> None:
        """Let others use the event loop; raises Problem (503) once the deadline of a batch is over."""
        await go_on()
        if self._service.timer() > lookup.started + lookup.options.deadline_s:
            self._service.admission.shed["late"] += 1
            raise Problem(503, "overloaded", "more is asked than can be answered in time")

    async def resolve(self, lookup: BatchRequest) -> ResolvedBatch:
        """Every answer, counted, in no form yet: rows as they are stored, all others as the ladder has them."""
        record_keys, is_plain = self._build_record_keys(lookup)
        plain_indexes = is_plain.nonzero()[0]
        if len(plain_indexes) == len(lookup.raws):
            return await self._resolve_stored(lookup, plain_indexes, record_keys)
        pending_by_index = {
            request_index: _build_pending(
                lookup, request_index, record_keys.record_key_at(request_index)
            )
            for request_index in np.flatnonzero(~is_plain).tolist()
        }
        if not len(plain_indexes):
            none = np.empty(0, lookup.table.layout.dtype)
            return ResolvedBatch(
                plain_indexes,
                none,
                np.empty(0, bool),
                await self._resolved(lookup, pending_by_index),
            )
        # At the same time: what they read travels in one turn.
        async with asyncio.TaskGroup() as task_group:
            below = task_group.create_task(self._resolved(lookup, pending_by_index))
            stored_task = task_group.create_task(
                self._resolve_stored(
                    lookup, plain_indexes, record_keys.select(plain_indexes.tolist())
                )
            )
        resolved = stored_task.result()
        resolved.answers.update(below.result())
        return resolved

    def _build_record_keys(self, lookup: BatchRequest) -> tuple[RecordKeys, NDArray[np.bool_]]:
        """Reads of all ids, and the mask of those that a record of the night may answer: known, and not blocked."""
        live, table = lookup.served.live, lookup.table
        directory = live.directories[table.entity]
        hashes = hash_ids(lookup.raws, directory.seed)
        positions = directory.find_many(hashes)
        digest = live.digest_without_input(table)
        record_keys = RecordKeys(
            table, hashes.tolist(), fingerprints(lookup.raws), positions, digest
        )
        is_plain = positions >= 0
        if live.has_blocked_entities:
            is_plain &= [not live.blocks(table, raw) for raw in lookup.raws]
        if live.changed_facet(table) is not None:
            is_plain[:] = False
        newer_events = self._ladder.newer_events
        if newer_events.packed and not newer_events.packed.keys().isdisjoint(lookup.raws):
            is_plain &= [not newer_events.changes(live, table, raw) for raw in lookup.raws]
        return record_keys, is_plain

    async def read(
        self, lookup: BatchRequest, record_keys: RecordKeys
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Reads the rows of ids that the night knows from the tiers; the mask says which of them are plain answers."""
        live, table = lookup.served.live, lookup.table
        deadline = None  # the tier keeps its own
        if lookup.options.deadline_s < self._service.l2_bound_s():
            deadline = self._ladder.l2_deadline(lookup.options, lookup.started, len(record_keys))
        rows = await self._tiers.get_rows(live.view, record_keys, deadline)
        is_plain = plain_record_mask(live, table, rows.records, lookup.k)
        if rows.result_by_index:
            is_plain[list(rows.result_by_index)] = False
        return rows, is_plain

    async def _resolve_stored(
        self, lookup: BatchRequest, request_indexes: NDArray[np.int64], record_keys: RecordKeys
    ) -> ResolvedBatch:
        began_at = self._service.timer()
        rows, is_plain = await self.read(lookup, record_keys)
        note("stored", self._service.timer() - began_at, len(record_keys))
        if np.count_nonzero(is_plain) == len(is_plain):
            resolved = ResolvedBatch(request_indexes, rows.records, rows.is_l2)
        else:
            resolved = ResolvedBatch(
                request_indexes[is_plain], rows.records[is_plain], rows.is_l2[is_plain]
            )
        if not (l2 := np.count_nonzero(resolved.is_l2)) or l2 == len(resolved.is_l2):
            self._count(lookup, resolved.answer_indices, STORED_SOURCES[bool(l2)])
        else:
            self._count(lookup, resolved.answer_indices[~resolved.is_l2], Source.L1)
            self._count(lookup, resolved.answer_indices[resolved.is_l2], Source.L2)
        self._note(lookup, resolved, record_keys, is_plain)
        if len(resolved.answer_indices) < len(request_indexes):
            pending_by_index = {}
            for at in np.flatnonzero(~is_plain).tolist():
                request_index = int(request_indexes[at])
                pending_by_index[request_index] = _build_pending(
                    lookup, request_index, record_keys.record_key_at(at)
                )
                pending_by_index[request_index].set_result(outcome_at(rows, at))
            resolved.answers.update(await self._resolved(lookup, pending_by_index))
        return resolved

    async def _resolved(
        self, lookup: BatchRequest, cases: dict[int, PendingAnswer]
    ) -> dict[int, AnswerJson]:
        """The ladder's answers, by place."""
        context = RequestContext.of(lookup.options, lookup.started)
        answers = await self._ladder.resolve(lookup.served, list(cases.values()), context)
        return dict(zip(cases, self._service.attach_staleness(answers), strict=True))

    def _count(
        self, lookup: BatchRequest, request_indexes: NDArray[np.int64], tier: Source
    ) -> None:
        """Counts the answers that a tier gave just now."""
        if len(request_indexes):
            name, raws = lookup.table.name, lookup.raws
            is_all = len(request_indexes) == len(raws)
            answered_raws = (
                raws
                if is_all
                else [raws[request_index] for request_index in request_indexes.tolist()]
            )
            self._ladder.recent.add(name, answered_raws)
            seconds = self._service.timer() - lookup.started
            self._metrics.count_fast_answers(name, tier, seconds, len(request_indexes))

    def _note(
        self,
        lookup: BatchRequest,
        resolved: ResolvedBatch,
        record_keys: RecordKeys,
        is_plain: NDArray[np.bool_],
    ) -> None:
        """Notes the keys read from Redis, and the answers that the sampler looks at again."""
        generation, table = lookup.served.live.generation, lookup.table.name
        count = len(resolved.answer_indices)
        if l2 := int(np.count_nonzero(resolved.is_l2)):
            keys: Sequence[int] = record_keys.keys
            if l2 < len(keys):
                at = np.flatnonzero(is_plain)[resolved.is_l2]
                keys = [keys[key_index] for key_index in at.tolist()]
            self._watch.read_many(generation, table, keys)
        sampler = self._watch.sampler
        sampler.countdown -= count
        for row_index in sampler.draw_indices(count) if sampler.countdown < 0 else ():
            raw = lookup.raws[int(resolved.answer_indices[row_index])]
            source = STORED_SOURCES[bool(resolved.is_l2[row_index])]
            sampler.put(AnswerSample(
                generation, table, raw, source, "batch", self._clock(), lookup.k,
                resolved.rows[row_index].tobytes(),
            ))  # fmt: skip

    def _texts(self, lookup: BatchRequest, resolved: ResolvedBatch, part: slice) -> list[bytes]:
        live, raws = lookup.served.live, lookup.raws
        static_tail = self.get_static_tail(live)
        ends = static_tail.ends(static_tail.age(self._clock()))
        by_tier = ends[Source.L1], ends[Source.L2]
        return texts_of(
            live,
            lookup.table,
            [
                raws[request_index].decode()
                for request_index in resolved.answer_indices[part].tolist()
            ],
            resolved.rows[part],
            lookup.k,
            [by_tier[is_l2] for is_l2 in resolved.is_l2[part].tolist()],
        )

    def get_static_tail(self, live: Snapshot) -> StaticTail:
        """The marks of answers from `live` at this moment, made once for as long as they hold."""
        static_tail, stale = self._static_tail, self._service.follower.stale
        if static_tail is None or static_tail.snapshot is not live or static_tail.stale != stale:
            static_tail = self._static_tail = StaticTail(live, stale)
        return static_tail


def _build_pending(
    lookup: BatchRequest, request_index: int, record_key: RecordKey
) -> PendingAnswer:
    raw = lookup.raws[request_index]
    entity = RequestedEntity(lookup.table.name, raw.decode(), raw, f"entities[{request_index}]")
    return build_plain_pending(lookup.served.live, lookup.table, lookup.k, record_key, entity)


def outcome_at(rows: Rows, at: int) -> ReadResult:
    """The outcome of row `at`, as a single read would have it."""
    read_result = rows.result_by_index.get(at)
    tier: Tier = "l2" if rows.is_l2[at] else "l1"
    return (
        Hit(rows.records[at].tobytes(), tier, False, None) if read_result is None else read_result
    )
