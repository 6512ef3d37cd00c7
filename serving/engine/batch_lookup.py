"""Lookup of a batch of plain ids, from request body to response bytes: L1, one L2 pipeline, the ladder for misses."""

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
from serving.admission.work_pacer import wait_for_next_portion, wait_for_room
from serving.engine.answer_builder import RequestContext
from serving.engine.answer_observer import AnswerSample
from serving.engine.entity import PendingAnswer, build_plain_pending_answer
from serving.engine.rendering.answer_fields import JSON_OPTIONS, AnswerJson, origin_fields
from serving.engine.rendering.arrow_answers import NO_ITEMS, StoredRows, answers_stream, row_of
from serving.engine.rendering.json_answers import StaticTail, answer_texts, plain_record_mask, record_numbers
from serving.engine.service import LookupService
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.requests.answers import STORED_SOURCES, Source
from serving.requests.context import note_stage
from serving.requests.errors import Problem
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.negotiation import BodyForm, Forms
from serving.requests.options import RequestOptions
from serving.requests.parsing import (
    LARGE_BODY_BYTES,
    IdBatch,
    RequestScope,
    id_batch_from_json,
    id_batch_from_stream,
    lookup_from_body,
    peek_content,
    run_in_thread_if_large,
    store_refusal,
    tighten_deadline,
)

_ANSWERS_PER_SLICE = 128
"""Answers rendered before the event loop gets control."""

_JSON_FORMS = Forms("json", "json")


@dataclass(frozen=True, slots=True, eq=False)
class BatchRequest:
    """Batch request for entities of a table; `raws` are the bytes of their ids, `started` is monotonic."""

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
class BatchAnswers:
    """Answers of a batch, one per id: rows for plain records of the live generation, JSON for all others.

    `answer_indices` int64[n]: the index of each row's answer. `rows`: n records of the table's dtype that
    `plain_record_mask` accepts. `is_l2` bool[n]: from L2, else from L1. `answers`: the answers of all other ids, by
    index, from the ladder or from a list with exclusions; each has its own source, generation and flags.
    """

    answer_indices: NDArray[np.int64]
    rows: NDArray[Any]
    is_l2: NDArray[np.bool_]
    answers: dict[int, AnswerJson] = field(default_factory=dict)


class PostedLookups:
    """Fast path of posted lookups; returns None for requests that must be refused, which the routes do."""

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
        id_batch = self._parse_id_batch(scope, body, form.request_form)
        if id_batch is None:
            if form != _JSON_FORMS:
                return None
            return await self._answer_from_ladder(scope, body, table.name, deadline_s, served, started)
        if is_k_too_large(table, id_batch.k):
            return None
        try:
            spend_quota(scope, len(id_batch.raws))
        except Problem as problem:
            store_refusal(scope, problem)
            return None
        options = RequestOptions(self._service.limits.deadline_ms / 1000, id_batch.k)
        options = tighten_deadline(options, deadline_s)
        batch_request = BatchRequest(served, table, id_batch.raws, options, started)
        answer_batch = self.batches.answer_arrow if form.response_form == "arrow" else self.batches.answer_json
        return await answer_batch(batch_request)

    def _parse_id_batch(self, scope: RequestScope, body: bytes, form: BodyForm) -> IdBatch | None:
        limits = self._service.limits
        if len(body) > LARGE_BODY_BYTES:  # batches of plain ids are rarely this large
            return None
        try:
            parsed_body = peek_content(scope, body, form, limits)
        except Problem:
            return None
        return (
            id_batch_from_stream(parsed_body) if form == "arrow" else id_batch_from_json(parsed_body, limits.max_batch)
        )

    async def _answer_from_ladder(
        self, scope: RequestScope, body: bytes, table: str, deadline_s: float, served: ServedGenerations, started: float
    ) -> bytes | None:
        service, limits = self._service, self._service.limits
        try:
            request = await run_in_thread_if_large(body, lambda: lookup_from_body(scope, body, "json", table, limits))
            # Only the service's own namespace is known here.
            if request.options.arm is not None or request.options.generation is not None:
                return None
            service.metrics.stage("parse", service.timer() - started)
            spend_quota(scope, len(request.entities))
            request = LookupRequest(request.entities, tighten_deadline(request.options, deadline_s))
            lookup_function = service.lookup(is_reshaped=request.options.is_reshaped)
            answers = await lookup_function(served, request, started)
        except (Problem, InvalidInput) as error:
            store_refusal(scope, error)
            return None
        return orjson.dumps({"answers": service.attach_staleness(answers)}, option=JSON_OPTIONS)


def is_k_too_large(table: Table, k: int | None) -> bool:
    """True if `k` exceeds the width of a top-k table, which the routes report."""
    return k is not None and k > table.layout.width and table.kind == "topk"


class BatchLookups:
    """Lookup of whole batches; each entity is resolved independently."""

    def __init__(self, service: LookupService, clock: Callable[[], float]) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._observer = service.ladder.observer
        self._clock = clock
        self._static_tail: StaticTail | None = None

    async def answer_json(self, lookup: BatchRequest) -> bytes:
        """Return the body of the response as JSON."""
        batch_answers = await self.resolve(lookup)
        json_texts: list[bytes] = []
        for slice_start in range(0, len(batch_answers.answer_indices), _ANSWERS_PER_SLICE):
            if slice_start:
                await self._yield_before_deadline(lookup)
            json_texts += self._render_texts(
                lookup, batch_answers, slice(slice_start, slice_start + _ANSWERS_PER_SLICE)
            )
        if batch_answers.answers:
            text_by_index = dict(zip(batch_answers.answer_indices.tolist(), json_texts, strict=True))
            for request_index, answer in batch_answers.answers.items():
                text_by_index[request_index] = orjson.dumps(answer, option=JSON_OPTIONS)
            json_texts = [text_by_index[request_index] for request_index in range(len(lookup.raws))]
        return b'{"answers":[%b]}' % b",".join(json_texts)

    async def answer_arrow(self, lookup: BatchRequest) -> bytes:
        """Return the body of the response as an Arrow IPC stream."""
        batch_answers = await self.resolve(lookup)
        id_slices: list[IdBytes] = []
        for slice_start in range(0, len(batch_answers.answer_indices), _ANSWERS_PER_SLICE):
            if slice_start:
                await self._yield_before_deadline(lookup)
            id_slices.append(list_items(lookup, batch_answers, slice(slice_start, slice_start + _ANSWERS_PER_SLICE)))
        stale = self._service.follower.stale
        return render_stream(lookup, batch_answers, id_slices, self._clock(), stale)

    async def _yield_before_deadline(self, lookup: BatchRequest) -> None:
        """Yield to the event loop; raise Problem (503) once the deadline of a batch has passed."""
        await wait_for_next_portion()
        if self._service.timer() > lookup.started + lookup.options.deadline_s:
            self._service.admission.shed_counts["late"] += 1
            raise Problem(503, "overloaded", "more requests arrive than can be answered in time")

    async def resolve(self, lookup: BatchRequest) -> BatchAnswers:
        """Resolve and count every answer, without rendering: rows as stored, all others as the ladder's JSON."""
        record_keys, plain_mask = self._build_record_keys(lookup)
        plain_indexes = plain_mask.nonzero()[0]
        if len(plain_indexes) == len(lookup.raws):
            return await self._resolve_stored(lookup, plain_indexes, record_keys)
        pending_by_index = {
            request_index: _build_pending(lookup, request_index, record_keys.record_key_at(request_index))
            for request_index in np.flatnonzero(~plain_mask).tolist()
        }
        if not len(plain_indexes):
            no_rows = np.empty(0, lookup.table.layout.dtype)
            return BatchAnswers(
                plain_indexes, no_rows, np.empty(0, bool), await self._resolve_by_ladder(lookup, pending_by_index)
            )
        # Concurrently, so that their reads are sent in the same iteration of the event loop.
        async with asyncio.TaskGroup() as task_group:
            ladder_task = task_group.create_task(self._resolve_by_ladder(lookup, pending_by_index))
            stored_task = task_group.create_task(
                self._resolve_stored(lookup, plain_indexes, record_keys.select(plain_indexes.tolist()))
            )
        batch_answers = stored_task.result()
        batch_answers.answers.update(ladder_task.result())
        return batch_answers

    def _build_record_keys(self, lookup: BatchRequest) -> tuple[RecordKeys, NDArray[np.bool_]]:
        """Build record keys of all ids, and the mask of those with a usable nightly record: known, and not blocked."""
        live, table = lookup.served.live, lookup.table
        directory = live.directories[table.entity]
        hashes = hash_ids(lookup.raws, directory.seed)
        positions = directory.find_positions(hashes)
        digest = live.digest_without_input(table)
        record_keys = RecordKeys(table, hashes.tolist(), fingerprints(lookup.raws), positions, digest)
        plain_mask = positions >= 0
        if live.has_blocked_entities:
            plain_mask &= [not live.blocks_entity(table, raw) for raw in lookup.raws]
        if table.name in live.changed_facets:
            plain_mask[:] = False
        newer_inputs = self._ladder.newer_inputs
        if newer_inputs.packed and not newer_inputs.packed.keys().isdisjoint(lookup.raws):
            plain_mask &= [not newer_inputs.changes(live, table, raw) for raw in lookup.raws]
        return record_keys, plain_mask

    async def read_rows(self, lookup: BatchRequest, record_keys: RecordKeys) -> tuple[Rows, NDArray[np.bool_]]:
        """Read the rows of ids that the night knows from the tiers; return also the mask of plain answers."""
        live, table = lookup.served.live, lookup.table
        deadline = None  # a copy: the tier keeps its own records
        if lookup.options.deadline_s < self._service.l2_bound_s():
            deadline = self._ladder.l2_deadline(lookup.options, lookup.started, len(record_keys))
        rows = await self._tiers.get_rows(live.view, record_keys, deadline)
        await wait_for_room()
        plain_mask = plain_record_mask(live, table, rows.records, lookup.k)
        if rows.result_by_index:
            plain_mask[list(rows.result_by_index)] = False
        return rows, plain_mask

    async def _resolve_stored(
        self, lookup: BatchRequest, request_indexes: NDArray[np.int64], record_keys: RecordKeys
    ) -> BatchAnswers:
        started_at = self._service.timer()
        rows, plain_mask = await self.read_rows(lookup, record_keys)
        note_stage("stored", self._service.timer() - started_at, len(record_keys))
        if np.count_nonzero(plain_mask) == len(plain_mask):
            batch_answers = BatchAnswers(request_indexes, rows.records, rows.l2_row_mask)
        else:
            batch_answers = BatchAnswers(
                request_indexes[plain_mask], rows.records[plain_mask], rows.l2_row_mask[plain_mask]
            )
        if not (l2_count := np.count_nonzero(batch_answers.is_l2)) or l2_count == len(batch_answers.is_l2):
            self._count_tier_answers(lookup, batch_answers.answer_indices, STORED_SOURCES[bool(l2_count)])
        else:
            self._count_tier_answers(lookup, batch_answers.answer_indices[~batch_answers.is_l2], Source.L1)
            self._count_tier_answers(lookup, batch_answers.answer_indices[batch_answers.is_l2], Source.L2)
        self._note_reads_and_samples(lookup, batch_answers, record_keys, plain_mask)
        if len(batch_answers.answer_indices) < len(request_indexes):
            pending_by_index = {}
            for read_index in np.flatnonzero(~plain_mask).tolist():
                request_index = int(request_indexes[read_index])
                pending_by_index[request_index] = _build_pending(
                    lookup, request_index, record_keys.record_key_at(read_index)
                )
                pending_by_index[request_index].set_read_result(read_result_at(rows, read_index))
            batch_answers.answers.update(await self._resolve_by_ladder(lookup, pending_by_index))
        return batch_answers

    async def _resolve_by_ladder(
        self, lookup: BatchRequest, pending_by_index: dict[int, PendingAnswer]
    ) -> dict[int, AnswerJson]:
        """Return the ladder's answers, by index."""
        context = RequestContext.of(lookup.options, lookup.started)
        answers = await self._ladder.resolve(lookup.served, list(pending_by_index.values()), context)
        return dict(zip(pending_by_index, self._service.attach_staleness(answers), strict=True))

    def _count_tier_answers(self, lookup: BatchRequest, request_indexes: NDArray[np.int64], tier: Source) -> None:
        """Count the answers from a tier."""
        if len(request_indexes):
            table_name, raws = lookup.table.name, lookup.raws
            is_all = len(request_indexes) == len(raws)
            answered_raws = raws if is_all else [raws[request_index] for request_index in request_indexes.tolist()]
            self._ladder.recent_names.add(table_name, answered_raws)
            seconds = self._service.timer() - lookup.started
            self._metrics.count_fast_answers(table_name, tier, seconds, len(request_indexes))

    def _note_reads_and_samples(
        self, lookup: BatchRequest, batch_answers: BatchAnswers, record_keys: RecordKeys, plain_mask: NDArray[np.bool_]
    ) -> None:
        """Record the keys read from Redis, and the answers that the sampler takes."""
        generation, table = lookup.served.live.generation, lookup.table.name
        row_count = len(batch_answers.answer_indices)
        if l2_count := int(np.count_nonzero(batch_answers.is_l2)):
            keys: Sequence[int] = record_keys.entity_hashes
            if l2_count < len(keys):
                l2_indexes = np.flatnonzero(plain_mask)[batch_answers.is_l2]
                keys = [keys[key_index] for key_index in l2_indexes.tolist()]
            self._observer.count_reads(generation, table, keys)
        sampler = self._observer.sampler
        sampler.countdown -= row_count
        for row_index in sampler.draw_indices(row_count) if sampler.countdown < 0 else ():
            raw = lookup.raws[int(batch_answers.answer_indices[row_index])]
            source = STORED_SOURCES[bool(batch_answers.is_l2[row_index])]
            sampler.put(AnswerSample(
                generation, table, raw, source, "batch", self._clock(), lookup.k,
                batch_answers.rows[row_index].tobytes(),
            ))  # fmt: skip

    def _render_texts(self, lookup: BatchRequest, batch_answers: BatchAnswers, row_slice: slice) -> list[bytes]:
        live, raws = lookup.served.live, lookup.raws
        static_tail = self.get_static_tail(live)
        end_by_source = static_tail.end_by_tier(static_tail.age_json(self._clock()))
        ends_by_tier = end_by_source[Source.L1], end_by_source[Source.L2]
        return answer_texts(
            live,
            lookup.table,
            [raws[request_index].decode() for request_index in batch_answers.answer_indices[row_slice].tolist()],
            batch_answers.rows[row_slice],
            lookup.k,
            [ends_by_tier[is_l2] for is_l2 in batch_answers.is_l2[row_slice].tolist()],
        )

    def get_static_tail(self, live: Snapshot) -> StaticTail:
        """Return the cached JSON fields that all answers of this snapshot share at present."""
        static_tail, stale = self._static_tail, self._service.follower.stale
        if static_tail is None or static_tail.snapshot is not live or static_tail.stale != stale:
            static_tail = self._static_tail = StaticTail(live, stale)
        return static_tail


def _build_pending(lookup: BatchRequest, request_index: int, record_key: RecordKey) -> PendingAnswer:
    raw = lookup.raws[request_index]
    entity = RequestedEntity(lookup.table.name, raw.decode(), raw, f"entities[{request_index}]")
    return build_plain_pending_answer(lookup.served.live, lookup.table, lookup.k, record_key, entity)


def read_result_at(rows: Rows, row_index: int) -> ReadResult:
    """Return the outcome of row `row_index` like that of a single read."""
    read_result = rows.result_by_index.get(row_index)
    tier: Tier = "l2" if rows.l2_row_mask[row_index] else "l1"
    return Hit(rows.records[row_index].tobytes(), tier, False, None) if read_result is None else read_result


def list_items(lookup: BatchRequest, batch_answers: BatchAnswers, row_slice: slice) -> IdBytes:
    """Return the ids of each list in a part of the rows; empty for a table without lists."""
    if lookup.table.kind != "topk":
        return NO_ITEMS
    layout, rows, lent = (lookup.table.layout, batch_answers.rows[row_slice], lookup.served.live.items.shared_ids)
    is_half = layout.precision == "f2"
    data, cuts = loader.kernels.names(rows, layout.width, is_half, lookup.k, *lent)
    return IdBytes(data, cuts, lookup.k)


def render_stream(
    lookup: BatchRequest, batch_answers: BatchAnswers, id_slices: Sequence[IdBytes], now_s: float, stale: str | None
) -> bytes:
    """Render the body of the response, with `list_items` of all rows; `now_s`: Unix seconds, `stale`: the service's."""
    live, table = lookup.served.live, lookup.table
    # The fields of both tiers differ only in the source, the first column.
    _, *common_fields = row_of(origin_fields(live, Source.L1, "batch", now_s, stale=stale))
    origin_by_tier = (Source.L1, *common_fields), (Source.L2, *common_fields)
    row_numbers = record_numbers(table, batch_answers.rows, lookup.k)
    stored_rows = StoredRows(
        batch_answers.answer_indices, origin_by_tier, batch_answers.is_l2, row_numbers, _concatenate_ids(id_slices)
    )
    return answers_stream(table, lookup.raws, batch_answers.answers, stored_rows)


def _concatenate_ids(id_parts: Sequence[IdBytes]) -> IdBytes:
    if len(id_parts) == 1:
        return id_parts[0]
    if not id_parts:
        return NO_ITEMS
    return IdBytes.of(
        b"".join([id_part.joined_ids for id_part in id_parts]),
        np.concatenate([id_part.id_sizes for id_part in id_parts]),
    )
