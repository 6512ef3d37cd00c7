"""Lookup of a batch of plain ids, from its body to its bytes: L1, one pipeline to L2, the ladder for misses."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.ids import fingerprints, hash_ids
from cache.format.item_table import IdBytes
from cache.format.manifest import Table
from cache.native import loader
from cache.tiers.reads import Hit, ReadResult, RecordKey, RecordKeys, Rows, Tier
from serving.access.callers import spend_quota
from serving.admission.work_pacer import go_on, resume
from serving.engine.answer_builder import RequestContext
from serving.engine.answer_observer import AnswerSample
from serving.engine.entity import PendingAnswer, build_plain_pending
from serving.engine.rendering.answer_fields import JSON, AnswerJson, origin_of
from serving.engine.rendering.arrow_answers import NO_ITEMS, StoredRows, answers_stream, row_of
from serving.engine.rendering.json_answers import (
    StaticTail,
    answer_texts,
    plain_record_mask,
    record_numbers,
)
from serving.engine.service import LookupService
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.requests.answers import STORED_SOURCES, Source
from serving.requests.context import note_stage
from serving.requests.errors import Problem
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.negotiation import Form, Forms
from serving.requests.options import RequestOptions
from serving.requests.parsing import (
    LARGE_BODY_BYTES,
    IdBatch,
    RequestScope,
    id_batch_from_json,
    id_batch_from_stream,
    keep_refusal,
    lookup_from_body,
    peek_content,
    run_in_thread_if_large,
    tighten_deadline,
)

_SLICE_ANSWERS = 128
"""Answers rendered before the event loop gets control."""

_JSON_FORMS = Forms("json", "json")


@dataclass(frozen=True, slots=True, eq=False)
class BatchRequest:
    """Batch request for the entities `raws` of a table, their ids' bytes; `started` is monotonic."""

    served: ServedGenerations
    table: Table
    raws: Sequence[bytes]
    options: RequestOptions
    started: float

    @property
    def k(self) -> int:
        """Number of items in each list."""
        return self.table.layout.width if self.options.k is None else self.options.k


@dataclass(slots=True, eq=False)
class ResolvedBatch:
    """Answers of a batch, one per id: rows for plain records of the live generation, JSON for all others.

    `answer_indices` int64[n]: the index of each row's answer. `rows`: n records of the table's dtype that
    `plain_record_mask` accepts. `is_l2` bool[n]: from L2, else from L1. `answers`: those of all other ids, by index,
    from the ladder or a shortened list; each has its source, generation and marks.
    """

    answer_indices: NDArray[np.int64]
    rows: NDArray[Any]
    is_l2: NDArray[np.bool_]
    answers: dict[int, AnswerJson] = field(default_factory=dict)


class PostedLookups:
    """Fast path of posted lookups; returns None for a request to be refused, which the routes do."""

    def __init__(self, service: LookupService, clock: Callable[[], float]) -> None:
        self.batches = BatchLookups(service, clock)
        self._service = service

    async def answer(
        self,
        scope: RequestScope,
        body: bytes,
        form: Forms,
        table: Table,
        deadline_s: float,
        served: ServedGenerations,
        started: float,
    ) -> bytes | None:
        """Return the body of the response in the requested form; `deadline_s` is the bound from the headers."""
        batch = self._batch(scope, body, form.request_form)
        if batch is None:
            if form != _JSON_FORMS:
                return None
            return await self._from_ladder(scope, body, table.name, deadline_s, served, started)
        if is_k_too_large(table, batch.k):
            return None
        try:
            spend_quota(scope, len(batch.raws))
        except Problem as problem:
            keep_refusal(scope, problem)
            return None
        options = RequestOptions(self._service.limits.deadline_ms / 1000, batch.k)
        options = tighten_deadline(options, deadline_s)
        lookup = BatchRequest(served, table, batch.raws, options, started)
        answered = self.batches.stream if form.response_form == "arrow" else self.batches.answer
        return await answered(lookup)

    def _batch(self, scope: RequestScope, body: bytes, form: Form) -> IdBatch | None:
        limits = self._service.limits
        if len(body) > LARGE_BODY_BYTES:  # ids alone hardly ever are
            return None
        try:
            parsed_body = peek_content(scope, body, form, limits)
        except Problem:
            return None
        return (
            id_batch_from_stream(parsed_body)
            if form == "arrow"
            else id_batch_from_json(parsed_body, limits.max_batch)
        )

    async def _from_ladder(
        self,
        scope: RequestScope,
        body: bytes,
        table: str,
        deadline_s: float,
        served: ServedGenerations,
        started: float,
    ) -> bytes | None:
        service, limits = self._service, self._service.limits
        try:
            request = await run_in_thread_if_large(
                body, lambda: lookup_from_body(scope, body, "json", table, limits)
            )
            # No namespace but the own one is known here.
            if request.options.arm is not None or request.options.generation is not None:
                return None
            service.metrics.stage("parse", service.timer() - started)
            spend_quota(scope, len(request.entities))
            request = LookupRequest(request.entities, tighten_deadline(request.options, deadline_s))
            lookup = service.lookup(is_reshaped=request.options.is_reshaped)
            answers = await lookup(served, request, started)
        except (Problem, InvalidInput) as error:
            keep_refusal(scope, error)
            return None
        return orjson.dumps({"answers": service.attach_staleness(answers)}, option=JSON)


def is_k_too_large(table: Table, k: int | None) -> bool:
    """True if `k` exceeds the width of a top-k table, which the routes report."""
    return k is not None and k > table.layout.width and table.kind == "topk"


class BatchLookups:
    """Lookup of whole batches; each entity is resolved on its own."""

    def __init__(self, service: LookupService, clock: Callable[[], float]) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._watch = service.ladder.watch
        self._clock = clock
        self._static_tail: StaticTail | None = None

    async def answer(self, lookup: BatchRequest) -> bytes:
        """Return the body of the response as JSON."""
        resolved = await self.resolve(lookup)
        texts: list[bytes] = []
        for start in range(0, len(resolved.answer_indices), _SLICE_ANSWERS):
            if start:
                await self._go_on(lookup)
            texts += self._texts(lookup, resolved, slice(start, start + _SLICE_ANSWERS))
        if resolved.answers:
            by_place = dict(zip(resolved.answer_indices.tolist(), texts, strict=True))
            for request_index, answer in resolved.answers.items():
                by_place[request_index] = orjson.dumps(answer, option=JSON)
            texts = [by_place[request_index] for request_index in range(len(lookup.raws))]
        return b'{"answers":[%b]}' % b",".join(texts)

    async def stream(self, lookup: BatchRequest) -> bytes:
        """Return the body of the response as an Arrow IPC stream."""
        resolved = await self.resolve(lookup)
        items: list[IdBytes] = []
        for start in range(0, len(resolved.answer_indices), _SLICE_ANSWERS):
            if start:
                await self._go_on(lookup)
            items.append(list_items(lookup, resolved, slice(start, start + _SLICE_ANSWERS)))
        stale = self._service.follower.stale
        return render_stream(lookup, resolved, items, self._clock(), stale)

    async def _go_on(self, lookup: BatchRequest) -> None:
        """Yield to the event loop; raise Problem (503) once the deadline of a batch is over."""
        await go_on()
        if self._service.timer() > lookup.started + lookup.options.deadline_s:
            self._service.admission.shed["late"] += 1
            raise Problem(503, "overloaded", "more is asked than can be answered in time")

    async def resolve(self, lookup: BatchRequest) -> ResolvedBatch:
        """Resolve and count every answer without a form: rows as stored, all others as the ladder's JSON."""
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
        """Build record keys of all ids, and the mask of those with a usable nightly record: known, and not blocked."""
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
        if table.name in live.changed_facets:
            is_plain[:] = False
        newer = self._ladder.newer_inputs
        if newer.packed and not newer.packed.keys().isdisjoint(lookup.raws):
            is_plain &= [not newer.changes(live, table, raw) for raw in lookup.raws]
        return record_keys, is_plain

    async def read(
        self, lookup: BatchRequest, record_keys: RecordKeys
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Read the rows of ids that the night knows from the tiers; return also the mask of plain answers."""
        live, table = lookup.served.live, lookup.table
        deadline = None  # the tier keeps its own
        if lookup.options.deadline_s < self._service.l2_bound_s():
            deadline = self._ladder.l2_deadline(lookup.options, lookup.started, len(record_keys))
        rows = await self._tiers.get_rows(live.view, record_keys, deadline)
        await resume()
        is_plain = plain_record_mask(live, table, rows.records, lookup.k)
        if rows.result_by_index:
            is_plain[list(rows.result_by_index)] = False
        return rows, is_plain

    async def _resolve_stored(
        self, lookup: BatchRequest, request_indexes: NDArray[np.int64], record_keys: RecordKeys
    ) -> ResolvedBatch:
        began_at = self._service.timer()
        rows, is_plain = await self.read(lookup, record_keys)
        note_stage("stored", self._service.timer() - began_at, len(record_keys))
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
                pending_by_index[request_index].set_result(read_result_at(rows, at))
            resolved.answers.update(await self._resolved(lookup, pending_by_index))
        return resolved

    async def _resolved(
        self, lookup: BatchRequest, cases: dict[int, PendingAnswer]
    ) -> dict[int, AnswerJson]:
        """Return the ladder's answers, by index."""
        context = RequestContext.of(lookup.options, lookup.started)
        answers = await self._ladder.resolve(lookup.served, list(cases.values()), context)
        return dict(zip(cases, self._service.attach_staleness(answers), strict=True))

    def _count(
        self, lookup: BatchRequest, request_indexes: NDArray[np.int64], tier: Source
    ) -> None:
        """Count the answers from a tier."""
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
        """Record the keys read from Redis, and the answers that the sampler takes."""
        generation, table = lookup.served.live.generation, lookup.table.name
        count = len(resolved.answer_indices)
        if l2 := int(np.count_nonzero(resolved.is_l2)):
            keys: Sequence[int] = record_keys.keys
            if l2 < len(keys):
                at = np.flatnonzero(is_plain)[resolved.is_l2]
                keys = [keys[key_index] for key_index in at.tolist()]
            self._watch.count_reads(generation, table, keys)
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
        return answer_texts(
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
        """Return the cached JSON fields that all answers from `live` share at this moment."""
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


def read_result_at(rows: Rows, at: int) -> ReadResult:
    """Return the outcome of row `at` in the form of a single read."""
    read_result = rows.result_by_index.get(at)
    tier: Tier = "l2" if rows.is_l2[at] else "l1"
    return (
        Hit(rows.records[at].tobytes(), tier, False, None) if read_result is None else read_result
    )


def list_items(lookup: BatchRequest, resolved: ResolvedBatch, part: slice) -> IdBytes:
    """Return the ids of each list in a part of the rows; empty for a table without lists."""
    if lookup.table.kind != "topk":
        return NO_ITEMS
    layout, rows, lent = (
        lookup.table.layout,
        resolved.rows[part],
        lookup.served.live.items.shared_ids,
    )
    is_half = layout.precision == "f2"
    data, cuts = loader.kernels.names(rows, layout.width, is_half, lookup.k, *lent)
    return IdBytes(data, cuts, lookup.k)


def render_stream(
    lookup: BatchRequest,
    resolved: ResolvedBatch,
    items: Sequence[IdBytes],
    now_s: float,
    stale: str | None,
) -> bytes:
    """Render the body of the response, with `list_items` of all rows; `now_s`: Unix seconds, `stale`: the service's."""
    live, table = lookup.served.live, lookup.table
    # Both tiers say the same but for the source, which is the first of the columns.
    _, *common_fields = row_of(origin_of(live, Source.L1, "batch", now_s, stale=stale))
    by_tier = (Source.L1, *common_fields), (Source.L2, *common_fields)
    row_numbers = record_numbers(table, resolved.rows, lookup.k)
    stored_rows = StoredRows(
        resolved.answer_indices, by_tier, resolved.is_l2, row_numbers, _concatenate(items)
    )
    return answers_stream(table, lookup.raws, resolved.answers, stored_rows)


def _concatenate(parts: Sequence[IdBytes]) -> IdBytes:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_ITEMS
    return IdBytes.of(
        b"".join([part.joined_ids for part in parts]),
        np.concatenate([part.id_sizes for part in parts]),
    )
