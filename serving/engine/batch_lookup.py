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
from serving.requests.request_record import note_stage

_ANSWERS_PER_SLICE = 128
"""Answers rendered before the event loop gets control."""

_JSON_FORMS = Forms("json", "json")


@dataclass(frozen=True, slots=True, eq=False)
class BatchRequest:
    """Batch request for entities of a table; `request_started_at` is monotonic."""

    served: ServedGenerations
    table: Table
    raw_ids: Sequence[bytes]
    options: RequestOptions
    request_started_at: float

    @property
    def k(self) -> int:
        """Number of items in each list."""
        return self.table.layout.width if self.options.k is None else self.options.k


@dataclass(slots=True, eq=False)
class BatchAnswers:
    """Answers of a batch, one per id: rows for plain records of the live generation, JSON for all others.

    `answer_indices` int64[n]: the index of each row's answer. `record_rows`: n records of the table's dtype that
    `plain_record_mask` accepts. `row_is_from_l2` bool[n]: from L2, else from L1. `answer_by_index`: the answers of all
    other ids, by index, from the ladder or from a list with exclusions; each has its own source, generation and flags.
    """

    answer_indices: NDArray[np.int64]
    record_rows: NDArray[Any]
    row_is_from_l2: NDArray[np.bool_]
    answer_by_index: dict[int, AnswerJson] = field(default_factory=dict)


class PostedLookups:
    """Fast path of posted lookups; returns None for requests that must be refused, which the routes do."""

    def __init__(self, service: LookupService, clock: Callable[[], float]) -> None:
        self.batches = BatchLookups(service, clock)
        self._service = service

    async def answer(
        self,
        scope: RequestScope,
        request_body: bytes,
        request_forms: Forms,
        table: Table,
        deadline_s: float,
        served: ServedGenerations,
        request_started_at: float,
    ) -> bytes | None:
        """Return the body of the response in the requested form; `deadline_s` is the bound from the headers."""
        id_batch = self._parse_id_batch(scope, request_body, request_forms.request_form)
        if id_batch is None:
            if request_forms != _JSON_FORMS:
                return None
            return await self._answer_from_ladder(
                scope, request_body, table.name, deadline_s, served, request_started_at
            )
        if is_k_too_large(table, id_batch.k):
            return None
        try:
            spend_quota(scope, len(id_batch.raw_ids))
        except Problem as problem:
            store_refusal(scope, problem)
            return None
        options = RequestOptions(self._service.limits.deadline_ms / 1000, id_batch.k)
        options = tighten_deadline(options, deadline_s)
        batch_request = BatchRequest(served, table, id_batch.raw_ids, options, request_started_at)
        answer_batch = self.batches.answer_arrow if request_forms.response_form == "arrow" else self.batches.answer_json
        return await answer_batch(batch_request)

    def _parse_id_batch(self, scope: RequestScope, request_body: bytes, form: BodyForm) -> IdBatch | None:
        limits = self._service.limits
        if len(request_body) > LARGE_BODY_BYTES:  # batches of plain ids are rarely this large
            return None
        try:
            parsed_body = peek_content(scope, request_body, form, limits)
        except Problem:
            return None
        return (
            id_batch_from_stream(parsed_body) if form == "arrow" else id_batch_from_json(parsed_body, limits.max_batch)
        )

    async def _answer_from_ladder(
        self,
        scope: RequestScope,
        request_body: bytes,
        table_name: str,
        deadline_s: float,
        served: ServedGenerations,
        request_started_at: float,
    ) -> bytes | None:
        service, limits = self._service, self._service.limits
        try:
            request = await run_in_thread_if_large(
                request_body, lambda: lookup_from_body(scope, request_body, "json", table_name, limits)
            )
            # Only the service's own namespace is known here.
            if request.options.arm is not None or request.options.generation is not None:
                return None
            service.metrics.stage("parse", service.monotonic_clock() - request_started_at)
            spend_quota(scope, len(request.entities))
            request = LookupRequest(request.entities, tighten_deadline(request.options, deadline_s))
            lookup_function = service.lookup(is_reshaped=request.options.is_reshaped)
            answers = await lookup_function(served, request, request_started_at)
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
        answer_json_texts: list[bytes] = []
        for slice_start in range(0, len(batch_answers.answer_indices), _ANSWERS_PER_SLICE):
            if slice_start:
                await self._yield_before_deadline(lookup)
            answer_json_texts += self._render_answer_texts(
                lookup, batch_answers, slice(slice_start, slice_start + _ANSWERS_PER_SLICE)
            )
        if batch_answers.answer_by_index:
            text_by_index = dict(zip(batch_answers.answer_indices.tolist(), answer_json_texts, strict=True))
            for request_index, answer in batch_answers.answer_by_index.items():
                text_by_index[request_index] = orjson.dumps(answer, option=JSON_OPTIONS)
            answer_json_texts = [text_by_index[request_index] for request_index in range(len(lookup.raw_ids))]
        return b'{"answers":[%b]}' % b",".join(answer_json_texts)

    async def answer_arrow(self, lookup: BatchRequest) -> bytes:
        """Return the body of the response as an Arrow IPC stream."""
        batch_answers = await self.resolve(lookup)
        item_ids_by_slice: list[IdBytes] = []
        for slice_start in range(0, len(batch_answers.answer_indices), _ANSWERS_PER_SLICE):
            if slice_start:
                await self._yield_before_deadline(lookup)
            item_ids_by_slice.append(
                list_items(lookup, batch_answers, slice(slice_start, slice_start + _ANSWERS_PER_SLICE))
            )
        stale_reason = self._service.follower.stale_reason
        return render_stream(lookup, batch_answers, item_ids_by_slice, self._clock(), stale_reason)

    async def _yield_before_deadline(self, lookup: BatchRequest) -> None:
        """Yield to the event loop; raise Problem (503) once the deadline of a batch has passed."""
        await wait_for_next_portion()
        if self._service.monotonic_clock() > lookup.request_started_at + lookup.options.deadline_s:
            self._service.admission.shed_counts["late"] += 1
            raise Problem(503, "overloaded", "more requests arrive than can be answered in time")

    async def resolve(self, lookup: BatchRequest) -> BatchAnswers:
        """Resolve and count every answer, without rendering: rows as stored, all others as the ladder's JSON."""
        record_keys, plain_mask = self._build_record_keys(lookup)
        plain_indexes = plain_mask.nonzero()[0]
        if len(plain_indexes) == len(lookup.raw_ids):
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
        batch_answers.answer_by_index.update(ladder_task.result())
        return batch_answers

    def _build_record_keys(self, lookup: BatchRequest) -> tuple[RecordKeys, NDArray[np.bool_]]:
        """Build record keys of all ids, and the mask of those with a usable nightly record: known, and not blocked."""
        live, table = lookup.served.live, lookup.table
        directory = live.directories[table.entity]
        hashes = hash_ids(lookup.raw_ids, directory.seed)
        positions = directory.find_positions(hashes)
        digest = live.digest_without_input(table)
        record_keys = RecordKeys(table, hashes.tolist(), fingerprints(lookup.raw_ids), positions, digest)
        plain_mask = positions >= 0
        if live.has_blocked_entities:
            plain_mask &= [not live.blocks_entity(table, raw_id) for raw_id in lookup.raw_ids]
        if table.name in live.changed_values_by_facet:
            plain_mask[:] = False
        newer_inputs = self._ladder.newer_inputs
        if newer_inputs.packed_input_by_id and not newer_inputs.packed_input_by_id.keys().isdisjoint(lookup.raw_ids):
            plain_mask &= [not newer_inputs.changes_answer(live, table, raw_id) for raw_id in lookup.raw_ids]
        return record_keys, plain_mask

    async def read_rows(self, lookup: BatchRequest, record_keys: RecordKeys) -> tuple[Rows, NDArray[np.bool_]]:
        """Read the rows of ids that the night knows from the tiers; return also the mask of plain answers."""
        live, table = lookup.served.live, lookup.table
        deadline_at = None  # a copy: the tier keeps its own records
        if lookup.options.deadline_s < self._service.l2_bound_s():
            deadline_at = self._ladder.l2_deadline(lookup.options, lookup.request_started_at, len(record_keys))
        rows = await self._tiers.get_rows(live.view, record_keys, deadline_at)
        await wait_for_room()
        plain_mask = plain_record_mask(live, table, rows.records, lookup.k)
        if rows.result_by_index:
            plain_mask[list(rows.result_by_index)] = False
        return rows, plain_mask

    async def _resolve_stored(
        self, lookup: BatchRequest, request_indexes: NDArray[np.int64], record_keys: RecordKeys
    ) -> BatchAnswers:
        started_at = self._service.monotonic_clock()
        rows, plain_mask = await self.read_rows(lookup, record_keys)
        note_stage("stored", self._service.monotonic_clock() - started_at, len(record_keys))
        if np.count_nonzero(plain_mask) == len(plain_mask):
            batch_answers = BatchAnswers(request_indexes, rows.records, rows.l2_row_mask)
        else:
            batch_answers = BatchAnswers(
                request_indexes[plain_mask], rows.records[plain_mask], rows.l2_row_mask[plain_mask]
            )
        if not (l2_count := np.count_nonzero(batch_answers.row_is_from_l2)) or l2_count == len(
            batch_answers.row_is_from_l2
        ):
            self._count_tier_answers(lookup, batch_answers.answer_indices, STORED_SOURCES[bool(l2_count)])
        else:
            self._count_tier_answers(lookup, batch_answers.answer_indices[~batch_answers.row_is_from_l2], Source.L1)
            self._count_tier_answers(lookup, batch_answers.answer_indices[batch_answers.row_is_from_l2], Source.L2)
        self._note_reads_and_samples(lookup, batch_answers, record_keys, plain_mask)
        if len(batch_answers.answer_indices) < len(request_indexes):
            pending_by_index = {}
            for read_index in np.flatnonzero(~plain_mask).tolist():
                request_index = int(request_indexes[read_index])
                pending_by_index[request_index] = _build_pending(
                    lookup, request_index, record_keys.record_key_at(read_index)
                )
                pending_by_index[request_index].set_read_result(read_result_at(rows, read_index))
            batch_answers.answer_by_index.update(await self._resolve_by_ladder(lookup, pending_by_index))
        return batch_answers

    async def _resolve_by_ladder(
        self, lookup: BatchRequest, pending_by_index: dict[int, PendingAnswer]
    ) -> dict[int, AnswerJson]:
        """Return the ladder's answers, by index."""
        context = RequestContext.of(lookup.options, lookup.request_started_at)
        answers = await self._ladder.resolve(lookup.served, list(pending_by_index.values()), context)
        return dict(zip(pending_by_index, self._service.attach_staleness(answers), strict=True))

    def _count_tier_answers(self, lookup: BatchRequest, request_indexes: NDArray[np.int64], tier: Source) -> None:
        """Count the answers from a tier."""
        if len(request_indexes):
            table_name, raw_ids = lookup.table.name, lookup.raw_ids
            is_all = len(request_indexes) == len(raw_ids)
            answered_raw_ids = (
                raw_ids if is_all else [raw_ids[request_index] for request_index in request_indexes.tolist()]
            )
            self._ladder.recent_names.add(table_name, answered_raw_ids)
            seconds = self._service.monotonic_clock() - lookup.request_started_at
            self._metrics.count_fast_answers(table_name, tier, seconds, len(request_indexes))

    def _note_reads_and_samples(
        self, lookup: BatchRequest, batch_answers: BatchAnswers, record_keys: RecordKeys, plain_mask: NDArray[np.bool_]
    ) -> None:
        """Record the keys read from Redis, and the answers that the sampler takes."""
        generation, table = lookup.served.live.generation, lookup.table.name
        row_count = len(batch_answers.answer_indices)
        if l2_count := int(np.count_nonzero(batch_answers.row_is_from_l2)):
            entity_hashes: Sequence[int] = record_keys.entity_hashes
            if l2_count < len(entity_hashes):
                l2_indexes = np.flatnonzero(plain_mask)[batch_answers.row_is_from_l2]
                entity_hashes = [entity_hashes[key_index] for key_index in l2_indexes.tolist()]
            self._observer.count_reads(generation, table, entity_hashes)
        sampler = self._observer.sampler
        sampler.countdown -= row_count
        for row_index in sampler.draw_indices(row_count) if sampler.countdown < 0 else ():
            raw_id = lookup.raw_ids[int(batch_answers.answer_indices[row_index])]
            source = STORED_SOURCES[bool(batch_answers.row_is_from_l2[row_index])]
            sampler.put(AnswerSample(
                generation, table, raw_id, source, "batch", self._clock(), lookup.k,
                batch_answers.record_rows[row_index].tobytes(),
            ))  # fmt: skip

    def _render_answer_texts(self, lookup: BatchRequest, batch_answers: BatchAnswers, row_slice: slice) -> list[bytes]:
        live, raw_ids = lookup.served.live, lookup.raw_ids
        static_tail = self.get_static_tail(live)
        end_by_source = static_tail.answer_end_by_tier(static_tail.age_json(self._clock()))
        ends_by_tier = end_by_source[Source.L1], end_by_source[Source.L2]
        return answer_texts(
            live,
            lookup.table,
            [raw_ids[request_index].decode() for request_index in batch_answers.answer_indices[row_slice].tolist()],
            batch_answers.record_rows[row_slice],
            lookup.k,
            [ends_by_tier[is_l2] for is_l2 in batch_answers.row_is_from_l2[row_slice].tolist()],
        )

    def get_static_tail(self, live: Snapshot) -> StaticTail:
        """Return the cached JSON fields that all answers of this snapshot share at present."""
        static_tail, stale_reason = self._static_tail, self._service.follower.stale_reason
        if static_tail is None or static_tail.snapshot is not live or static_tail.stale_reason != stale_reason:
            static_tail = self._static_tail = StaticTail(live, stale_reason)
        return static_tail


def _build_pending(lookup: BatchRequest, request_index: int, record_key: RecordKey) -> PendingAnswer:
    raw_id = lookup.raw_ids[request_index]
    entity = RequestedEntity(lookup.table.name, raw_id.decode(), raw_id, f"entities[{request_index}]")
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
    layout, rows, lent = (
        lookup.table.layout,
        batch_answers.record_rows[row_slice],
        lookup.served.live.items.shared_ids,
    )
    is_half = layout.precision == "f2"
    data, cuts = loader.kernels.names(rows, layout.width, is_half, lookup.k, *lent)
    return IdBytes(data, cuts, lookup.k)


def render_stream(
    lookup: BatchRequest,
    batch_answers: BatchAnswers,
    item_ids_by_slice: Sequence[IdBytes],
    now_s: float,
    stale_reason: str | None,
) -> bytes:
    """Render the body of the response, with `list_items` of all rows; `now_s` are Unix seconds."""
    live, table = lookup.served.live, lookup.table
    # The fields of both tiers differ only in the source, the first column.
    _, *common_fields = row_of(origin_fields(live, Source.L1, "batch", now_s, stale=stale_reason))
    origin_by_tier = (Source.L1, *common_fields), (Source.L2, *common_fields)
    row_numbers = record_numbers(table, batch_answers.record_rows, lookup.k)
    stored_rows = StoredRows(
        batch_answers.answer_indices,
        origin_by_tier,
        batch_answers.row_is_from_l2,
        row_numbers,
        _concatenate_ids(item_ids_by_slice),
    )
    return answers_stream(table, lookup.raw_ids, batch_answers.answer_by_index, stored_rows)


def _concatenate_ids(item_ids_by_slice: Sequence[IdBytes]) -> IdBytes:
    if len(item_ids_by_slice) == 1:
        return item_ids_by_slice[0]
    if not item_ids_by_slice:
        return NO_ITEMS
    return IdBytes.of(
        b"".join([slice_ids.joined_ids for slice_ids in item_ids_by_slice]),
        np.concatenate([slice_ids.id_sizes for slice_ids in item_ids_by_slice]),
    )
