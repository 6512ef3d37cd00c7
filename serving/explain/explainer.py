"""Explanation of an entity's answer: the content of each rung, the rung that answers, and a new inference."""

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, LarderError, TierUnavailable, UnfitValue
from cache.events.event_predictor import EventInput, GenerationEvents
from cache.format.manifest import Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import Position
from cache.l2.commands import L2Result, Overlay, PageRead
from cache.l2.data_plane import DataPlane
from cache.model.agreement import absolute_errors, cosine, overlap
from cache.model.filter_mask import FilterMask
from cache.records import Record, decode_record, is_answer_of, is_live, peek_format
from cache.store.artefacts import ArtefactStore, generation_path
from cache.tiers.l1 import LocalKey
from cache.tiers.reads import (
    MISS_BY_REASON,
    Hit,
    Miss,
    MissReason,
    ReadResult,
    RecordKey,
    SnapshotView,
    judge_entry,
    live_key,
    overlay_entry,
    reads_of,
    unavailable_miss,
    unsound_reason,
)
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.engine.answer_builder import RequestContext
from serving.engine.entity import (
    NewerInput,
    PendingAnswer,
    build_pending_answers,
    find_previous_record_key,
    find_record_key,
    new_items_of,
)
from serving.engine.ladder import Ladder
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, LiveUnavailable, MicroBatcher
from serving.engine.rendering.answer_fields import (
    Prediction,
    Reranker,
    iso_time,
    may_have_more_items,
    prediction_from_defaults,
    prediction_from_record,
)
from serving.generations.pointer_follower import PointerFollower
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot, user_vector_table
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads
from serving.requests.answers import FALLBACK_SOURCES, STORED_SOURCES, Source
from serving.requests.errors import Problem, unprocessable
from serving.requests.models import LookupRequest
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason

log = logging.getLogger(__name__)

_PAGE_TIMEOUT_S = 3.0
"""Seconds for reading a whole page of megabytes."""

_CHECKSUMS_TIMEOUT_S = 2.0
"""Seconds for reading the checksums from the artefact store."""

_CHECKSUM_READS_MAX = 2
"""Largest number of checksum reads under way, including abandoned ones."""

RESCORE_TIMEOUT_S = 2.0
"""Seconds for one inference, including the wait for the model."""

_UNBOUNDED_S = 3_600.0

EXPLANATIONS_MAX = 2
"""Largest number of explanations under way: each reads a whole page and runs the model."""

RescoreInput = Literal["sent", "own", "events", "stored_vector"]


class TierInspector:
    """Read-only inspector of both tiers: does not fill, reorder or count anything.

    Its reads of L2 use the normal path, so they count for the circuit breaker and may fail like any read.
    """

    def __init__(
        self, tiers: TieredCache, remote: DataPlane, monotonic_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._l1 = tiers.local_tier
        self._negative_cache = tiers.negative_cache
        self._remote = remote
        self._monotonic_clock = monotonic_clock

    def inspect_l1(self, view: SnapshotView, record_key: RecordKey) -> ReadResult | None:
        """Return the outcome of inspecting L1; None if L1 has nothing for this entity."""
        l1_key = LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest)
        l1_entry = self._l1.inspect(l1_key)
        if l1_entry is not None:
            return judge_entry(l1_entry, record_key, "l1")
        if record_key.directory_position < 0 and l1_key in self._negative_cache:
            return MISS_BY_REASON[MissReason.NEGATIVE]
        return None

    def find_stand_in(self, view: SnapshotView, record_key: RecordKey) -> ReadResult | None:
        """Return the live answer in L1 that replaces a record while its page is unavailable, if there is one."""
        if record_key.directory_position < 0 or record_key.input_digest is None:
            return None
        l1_key = LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest)
        l1_entry = self._l1.inspect(live_key(l1_key, record_key.input_digest))
        return None if l1_entry is None else judge_entry(l1_entry, record_key, "l1")

    async def read_record(self, view: SnapshotView, record_key: RecordKey) -> ReadResult:
        """Return the outcome of L1 if it has the record, else that of a read of L2."""
        outcome = self.inspect_l1(view, record_key)
        return outcome if isinstance(outcome, Hit) else await self.read_l2(view, record_key)

    async def read_l2(self, view: SnapshotView, record_key: RecordKey) -> ReadResult:
        """Return the outcome of a read of L2."""
        asked_at = self._monotonic_clock()
        l2_reply: L2Result = await self._remote.submit(reads_of(view, (record_key,)), itemgetter(0))
        if isinstance(l2_reply, TierUnavailable):
            return unavailable_miss(l2_reply)
        if record_key.directory_position < 0:
            if l2_reply is None:
                return MISS_BY_REASON[MissReason.NOT_IN_GENERATION]
            entry = overlay_entry(record_key, cast(Overlay, l2_reply), asked_at)
            return entry if isinstance(entry, Miss) else judge_entry(entry, record_key, "l2")
        if not isinstance(l2_reply, bytes):
            return MISS_BY_REASON[MissReason.PAGE_MISSING]
        if not is_answer_of(l2_reply, record_key.fingerprint):
            return MISS_BY_REASON[unsound_reason(l2_reply, record_key.fingerprint)]
        return Hit(l2_reply, "l2", False, None)

    async def read_page(self, page_read: PageRead) -> bytes | Miss:
        """Return a whole page, or the reason of a miss."""
        try:
            async with asyncio.timeout(_PAGE_TIMEOUT_S):
                page_payload = await self._remote.page(page_read)
        except TierUnavailable as error:
            return unavailable_miss(error)
        except TimeoutError:
            return MISS_BY_REASON[MissReason.L2_TIMEOUT]
        return MISS_BY_REASON[MissReason.PAGE_MISSING] if page_payload is None else page_payload


@dataclass(slots=True, eq=False)
class PageChecks:
    """Checker of whole pages against their checksums, used only for explanations."""

    tier_inspector: TierInspector
    keyspace: Keyspace
    store: ArtefactStore
    in_thread: StoreThreads
    _checksum_tasks: set[asyncio.Task[str]] = field(init=False, default_factory=set)

    async def check_page(self, snapshot: Snapshot, table: Table, record_key: RecordKey) -> dict[str, Any]:
        """Read a nightly record's page; return its key, the record's position, and both checksums (xxh3-64, hex)."""
        shard, record_position = snapshot.directories[table.entity].locate_in_part(record_key.directory_position)
        table_part = table.parts[shard]
        page_number, offset_bytes = table.locate_record(shard, record_position)
        page_index = page_number - table_part.first_page
        record_count = min(table.records_per_page, table_part.count - page_index * table.records_per_page)
        size_bytes = record_count * table.layout.size_bytes
        generation = snapshot.generation
        page_report: dict[str, Any] = {
            "key": self.keyspace.page(generation, table.name, page_number),
            "number": page_number,
            "shard": shard,
            "offset_bytes": offset_bytes,
            "size_bytes": size_bytes,
            "records": record_count,
        }
        page_result = await self.tier_inspector.read_page(PageRead(generation, table.name, page_number, 0, size_bytes))
        expected, sums_error = await self._expected_checksum_and_error(generation, table_part, page_index)
        if isinstance(page_result, Miss):
            return page_report | {"state": page_result.reason.value, "expected": expected, "checksum": None}
        checksum = f"{xxhash.xxh3_64_intdigest(page_result):016x}"
        state = "unchecked" if expected is None else "ok" if checksum == expected else "damaged"
        page_report |= {"state": state, "expected": expected, "checksum": checksum}
        return page_report | ({"why": sums_error} if sums_error else {})

    async def _expected_checksum_and_error(
        self, generation: str, part: TablePart, page_index: int
    ) -> tuple[str | None, str | None]:
        timeout_message = f"the artefact store did not deliver the checksums within {_CHECKSUMS_TIMEOUT_S:g} s"
        if len(self._checksum_tasks) >= _CHECKSUM_READS_MAX:
            return None, timeout_message
        task = asyncio.create_task(self.in_thread(self._read_checksum, generation, part, page_index))
        self._checksum_tasks.add(task)
        task.add_done_callback(self._discard_task)
        # Not cancelled at the time-out: the thread would go on, and the next request would occupy another one.
        if not (await asyncio.wait({task}, timeout=_CHECKSUMS_TIMEOUT_S))[0]:
            return None, timeout_message
        try:
            return task.result(), None
        except LarderError as error:
            return None, error.message

    def _discard_task(self, task: "asyncio.Task[str]") -> None:
        self._checksum_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the waiting requests have the error, too

    def _read_checksum(self, generation: str, part: TablePart, page_index: int) -> str:
        checksum_bytes = self.store.read(generation_path(generation, part.sums.path))
        if checksum_bytes is None or hashlib.sha256(checksum_bytes).hexdigest() != part.sums.sha256:
            raise CorruptArtefact(f"{part.sums.path} is missing in the store, or damaged")
        return f"{int(np.frombuffer(checksum_bytes, '<u8')[page_index]):016x}"


@dataclass(frozen=True, slots=True)
class RescoreResult:
    """Result of a rescore: a record, or the `failure_reason` why there is none.

    `computed_from`: the sent history or features, the item itself, the night's input of a user with newer events, or
    the user's stored vector. The vector only scores the items of the stored list; it does not show which other items
    would be in it.
    """

    record: Record | None
    failure_reason: str | None
    computed_from: RescoreInput | None
    rescore_seconds: float
    model_precision: str | None
    computed_record: bytes | None = None
    """Encoded record of an inference from an input; None if scored by the stored vector."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the explanation except the prediction."""
        return {
            "computed_from": self.computed_from,
            "reason": self.failure_reason,
            "seconds": round(self.rescore_seconds, 6),
            "precision": self.model_precision,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Rescorer:
    """Rescorer that uses the queue and the admission of live inference, so that lookups have priority under load."""

    batcher: MicroBatcher
    admission: Admission
    inspector: TierInspector

    async def rescore(self, snapshot: Snapshot, case: PendingAnswer, stored_record: Record | None) -> RescoreResult:
        """Compute an answer from the entity's input, else score the items of the stored list by the stored vector."""
        began_at = time.monotonic()
        precision = "fp32" if _rescore_input_of(case) == "events" else _precision(snapshot, case.table)
        if snapshot.predictor is None:
            return RescoreResult(None, LiveReason.NO_MODEL, _rescore_input_of(case), 0.0, None)
        record: Record | None = None
        computed_record: bytes | None = None
        reason: str | None = "nothing_to_compute_from"
        computed_from = _rescore_input_of(case)
        if case.may_compute_live(snapshot):
            record, computed_record, reason = await self._infer_live(snapshot, case)
        elif computed_from is not None:  # blocked, or without a producer
            reason = case.reason if case.reason == MissReason.ENTITY_BLOCKED else "no_producer"
        elif stored_record is not None and stored_record.item_ordinals is not None:
            record = await self._rescore_from_vector(snapshot, case, stored_record)
            if record is not None:
                reason, computed_from = None, "stored_vector"
        seconds = time.monotonic() - began_at
        return RescoreResult(record, reason, computed_from, seconds, precision, computed_record)

    async def _infer_live(
        self, snapshot: Snapshot, case: PendingAnswer
    ) -> tuple[Record | None, bytes | None, str | None]:
        """Return the decoded record and its bytes, or the reason why there is none."""
        if not self.admission.admit_live():
            return None, None, LiveReason.OVERLOADED
        job = InferenceJob(
            snapshot, case.table.name, case.live_input, case.record_key.fingerprint, case.input_size_bytes,
            time.monotonic() + RESCORE_TIMEOUT_S,
            newer_input=None if case.is_settled_for_stored else case.counted_events and case.counted_events.event_input,
            eligible_new_items=new_items_of(snapshot, case), seen_item_ordinals=case.find_seen_ordinals(snapshot),
        )  # fmt: skip
        try:
            computed_record = await asyncio.wait_for(self.batcher.infer(job), RESCORE_TIMEOUT_S)
            return (case.decode_record(snapshot, computed_record.record), computed_record.record, None)
        except LiveUnavailable as error:
            return None, None, error.reason
        except TimeoutError:
            return None, None, LiveReason.TIMEOUT
        except UnfitValue as error:
            log.warning("live inference for %s failed: %s", case.table.name, error.message)
            return None, None, LiveReason.FAILED
        except Exception:  # the model is foreign code
            log.warning("live inference for %s failed", case.table.name, exc_info=True)
            return None, None, LiveReason.FAILED

    async def _rescore_from_vector(
        self, snapshot: Snapshot, case: PendingAnswer, stored_record: Record
    ) -> Record | None:
        """Return the stored list, scored and ordered by the stored vector; None without one."""
        user_id, list_items, predictor = case.entity.raw_id, stored_record.item_ordinals, snapshot.predictor
        if user_id is None or list_items is None or predictor is None or case.table.entity != "user":
            return None
        if not predictor.supports(case.table.name):
            return None
        try:
            vector_table = user_vector_table(snapshot)
        except Problem:
            return None
        record_key = find_record_key(snapshot, vector_table, user_id)
        outcome = await self.inspector.read_record(snapshot.view, record_key)
        if not isinstance(outcome, Hit):
            return None
        try:
            vector = PendingAnswer(
                case.entity, vector_table, vector_table.layout.width, record_key, case.input_digest
            ).decode_record(snapshot, outcome.record)
        except CorruptArtefact:
            return None
        ordinals = list_items.astype(np.int64)
        scores = await asyncio.to_thread(predictor.score_vector, case.table.name, vector.numbers, ordinals)
        order = np.lexsort((ordinals, -scores))
        return stored_record._replace(numbers=scores[order], item_ordinals=list_items[order])


def _rescore_input_of(case: PendingAnswer) -> RescoreInput | None:
    if case.counted_events is not None and not case.is_settled_for_stored:
        return "events"
    if case.entity.has_input:
        return "sent"
    return None if case.own_ordinal is None else "own"


def _precision(snapshot: Snapshot, table: Table) -> str | None:
    predictor = snapshot.predictor
    return None if predictor is None else predictor.precisions.get(str(table.producer.model))


class UncountedMetrics(Metrics):
    """Metrics of the explainer's lookups; discarded."""

    def stage(self, stage_name: str, stage_seconds: float, entity_count: int = 0) -> None:
        """Ignore a stage: the explanation's request measures its own stages."""


class LadderReplay:
    """Tiers and inference of a ladder that answers one entity from recorded outcomes.

    Nothing is stored, counted or read again. `l1`, `l2` and `live_result` (a live answer that replaces a record while
    its page is unavailable) are of the live generation.
    """

    def __init__(
        self,
        inspector: TierInspector,
        l1_result: ReadResult | None,
        l2_result: ReadResult,
        live_result: ReadResult | None,
        rescore_result: RescoreResult,
    ) -> None:
        self._inspector = inspector
        self._rescore_result = rescore_result
        self._result_by_key: dict[tuple[str, int | bytes], ReadResult] = {}
        stored_result = l2_result if l1_result is None else l1_result
        if isinstance(stored_result, Miss) and stored_result.reason.traits.is_outage and isinstance(live_result, Hit):
            stored_result = live_result._replace(reason=stored_result.reason)
        self.stored_result = stored_result

    async def resolve_case(
        self, served: ServedGenerations, case: PendingAnswer, requested_options: RequestOptions, metrics: Metrics
    ) -> PendingAnswer:
        """Run the ladder on the recorded outcomes; return the pending answer with its source and reason."""
        self._result_by_key[served.live.generation, case.record_key.hash_or_digest] = self.stored_result
        ladder = Ladder(self, self, metrics, l2_deadline_s=_UNBOUNDED_S)
        options = dataclasses.replace(
            requested_options,
            deadline_s=_UNBOUNDED_S,
            filter=None,
            rerank=None,
            max_events=0,  # the pending answer counts them already
        )
        case = dataclasses.replace(case, reason=None)
        await ladder.resolve(served, [case], RequestContext.of(options, time.monotonic()))
        return case

    async def read(self, view: SnapshotView, record_key: RecordKey) -> ReadResult:
        """Return the outcome of inspecting both tiers, once per generation and record."""
        result_key = view.generation, record_key.hash_or_digest
        if result_key not in self._result_by_key:
            self._result_by_key[result_key] = await self._inspector.read_record(view, record_key)
        return self._result_by_key[result_key]

    async def get_many(
        self,
        view: SnapshotView,
        record_keys: Sequence[RecordKey],
        deadline_at: float,  # noqa: ARG002 - what was seen waits for nobody
    ) -> Sequence[ReadResult]:
        """Return the recorded outcomes."""
        return [await self.read(view, record_key) for record_key in record_keys]

    def discard(self, view: SnapshotView, record_key: RecordKey) -> None:
        """Do nothing: an inspection does not remove a damaged record."""

    def plan_overlay_reads(self, snapshot: Snapshot, cases: Sequence[PendingAnswer]) -> None:
        """Do nothing: all overlays are read."""

    def note_repeat(self) -> None:
        """Do nothing: an inspection counts no repeats."""

    async def run(
        self,
        snapshot: Snapshot,  # noqa: ARG002
        cases: Sequence[PendingAnswer],
        time_limit_s: float,  # noqa: ARG002
    ) -> Sequence[ComputedRecord | LiveUnavailable]:
        """Return the outcome of the inference that was already run."""
        computed_record, reason = self._rescore_result.computed_record, self._rescore_result.failure_reason
        return [
            LiveUnavailable(reason or LiveReason.FAILED) if computed_record is None else ComputedRecord(computed_record)
            for _ in cases
        ]


@dataclass(frozen=True, slots=True, eq=False)
class RecordDecoder:
    """Decoder of one entity's recorded outcomes to predictions."""

    snapshot: Snapshot
    case: PendingAnswer
    excluded_ordinals: frozenset[int]

    def find_nightly_record(self, *outcomes: ReadResult | None) -> tuple[Record, Hit] | None:
        """Return the nightly record from the first tier that has it."""
        return next(
            (record_and_hit for record_and_hit in self._readable_records(outcomes) if not record_and_hit[1].is_live),
            None,
        )

    def find_readable_record(self, *outcomes: ReadResult | None) -> tuple[Record, Hit] | None:
        """Return the first readable record."""
        return next(iter(self._readable_records(outcomes)), None)

    def prediction(
        self, record: Record, filter_mask: FilterMask | None = None, reranker: Reranker | None = None
    ) -> Prediction:
        """Build the prediction of an answer: without blocked, seen and filtered items, cut at `k`."""
        case, exclusion_sets = self.case, (self.excluded_ordinals,)
        return prediction_from_record(self.snapshot, case.table, record, case.k, exclusion_sets, filter_mask, reranker)

    def _readable_records(self, outcomes: tuple[ReadResult | None, ...]) -> list[tuple[Record, Hit]]:
        hits = [read_result for read_result in outcomes if isinstance(read_result, Hit)]
        records_and_hits = [(self._decode_hit(hit), hit) for hit in hits]
        return [(record, hit) for record, hit in records_and_hits if record is not None]

    def _decode_hit(self, hit: Hit) -> Record | None:
        try:
            return self.case.decode_record(self.snapshot, hit.record)
        except CorruptArtefact:
            return None


class Explainer:
    """Explainer of answers; changes nothing: stores no record and counts no answer."""

    def __init__(
        self,
        follower: PointerFollower,
        tiers: TieredCache,
        remote: DataPlane,
        batcher: MicroBatcher,
        admission: Admission,
        store: ArtefactStore,
        ladder: Ladder,
        *,
        in_thread: StoreThreads,
    ) -> None:
        self._follower = follower
        self._inspector = inspector = TierInspector(tiers, remote)
        self._page_checks = PageChecks(inspector, remote.control.keyspace, store, in_thread)
        self._rescorer = Rescorer(batcher, admission, inspector)
        self._ladder = ladder
        self._under_way_count = 0
        self._uncounted_metrics = UncountedMetrics()

    async def explain(self, served: ServedGenerations, request: LookupRequest) -> dict[str, Any]:
        """Explain the answer of one entity; raise Problem for several entities, an invalid request, and when busy."""
        if len(request.entities) != 1:
            raise unprocessable("batch_too_long", "a request explains exactly one entity", "entities")
        if self._under_way_count >= EXPLANATIONS_MAX:
            raise Problem(503, "overloaded", f"{EXPLANATIONS_MAX} explanations are already under way")
        self._under_way_count += 1
        try:
            return await self._build_explanation(served.pin_generation(request.options.generation), request)
        finally:
            self._under_way_count -= 1

    async def _build_explanation(self, served: ServedGenerations, request: LookupRequest) -> dict[str, Any]:
        snapshot = served.live
        (case,) = await build_pending_answers(snapshot, request)

        async def read_records(record_keys: Sequence[RecordKey]) -> Sequence[ReadResult]:
            return [await self._inspector.read_record(snapshot.view, record_key) for record_key in record_keys]

        await self._ladder.newer_inputs.count_newer(snapshot, [case], request.options, read_records)
        deadline = time.monotonic() + request.options.deadline_s
        filter_mask = await self._ladder.shaper.filter_mask(snapshot, request.options, deadline)
        reranker = await self._ladder.shaper.reranker(snapshot, request.options, deadline)
        table, night_key, entity_id, requested_key = (case.table, case.nightly_key, case.entity.raw_id, case.record_key)
        view = snapshot.view
        l1, l2 = (self._inspector.inspect_l1(view, requested_key), await self._inspector.read_l2(view, requested_key))
        live_result = self._inspector.find_stand_in(view, requested_key)
        excluded_ordinals = case.history_in(snapshot).item_numbers if table.kind == "topk" else frozenset()
        if case.counted_events is not None:
            excluded_ordinals |= frozenset(snapshot.numbers_of(case.counted_events.event_item_ids).tolist())
        record_decoder = RecordDecoder(snapshot, case, excluded_ordinals)
        if snapshot.blocks_entity(table, entity_id):
            case.reason = MissReason.ENTITY_BLOCKED
        night_record_and_hit = record_decoder.find_nightly_record(l1, l2)
        rescore_result = await self._rescorer.rescore(snapshot, case, night_record_and_hit and night_record_and_hit[0])
        replay = LadderReplay(self._inspector, l1, l2, live_result, rescore_result)
        answered_case = await replay.resolve_case(served, case, request.options, self._uncounted_metrics)
        previous = await self._previous_fields(served, answered_case, replay)
        answer = _answer_fields(answered_case)
        is_stored = answer["tier"] in STORED_SOURCES
        answer_read_result = await replay.read(view, answered_case.record_key) if is_stored else None
        explanation: dict[str, Any] = {
            "table": table.name,
            "id": case.entity.id,
            "generation": snapshot.generation,
            "epoch": snapshot.epoch,
            "published_at": snapshot.published_at,
            "age_seconds": round(time.time() - snapshot.manifest.data_until, 3),
            "stale": self._follower.stale_reason,
            "degraded": snapshot.degraded_reason,
            "answer": answer,
            "directory": self._directory_fields(snapshot, night_key),
            "events": _event_fields(snapshot, case.counted_events),
            "new_items": _new_item_rows(answered_case),
            "page": await self._page_checks.check_page(snapshot, night_key.table, night_key)
            if night_key.directory_position >= 0
            else None,
            "l1": self._tier_fields(l1),
            "l2": self._tier_fields(l2),
            "same_bytes": _has_same_record(l1, l2),
            "record": None,
            "filter": filter_mask and {"passing": filter_mask.passing_count, "items": snapshot.nameable_item_count},
            "rerank": request.options.rerank and {"by": request.options.rerank.part_names},
            "previous": previous,
            "model": rescore_result.to_json(),
            "difference": None,
        }
        shown_record_and_hit = night_record_and_hit or record_decoder.find_readable_record(answer_read_result, l1, l2)
        live_prediction = None if rescore_result.record is None else record_decoder.prediction(rescore_result.record)
        explanation["model"] |= live_prediction or {}
        if shown_record_and_hit is not None:
            prediction = record_decoder.prediction(shown_record_and_hit[0])
            explanation["record"] = _record_fields(*shown_record_and_hit, prediction)
            if filter_mask is not None and shown_record_and_hit[0].item_ordinals is not None:
                explanation["filter"] |= _list_fields(
                    record_decoder.prediction(shown_record_and_hit[0], filter_mask), shown_record_and_hit[0], table
                )
                explanation["filter"] |= {"table": night_key.table.name}
            if reranker is not None and shown_record_and_hit[0].item_ordinals is not None:
                list_prediction = record_decoder.prediction(shown_record_and_hit[0], filter_mask, reranker)
                explanation["rerank"] |= {"items_of_list": list_prediction["items"]}
            if live_prediction is not None and night_key.table is table:
                explanation["difference"] = prediction_difference(prediction, live_prediction)
        if answer["tier"] == Source.DEFAULT and entity_id is not None:
            history_ordinals = frozenset(answered_case.find_seen_ordinals(snapshot).tolist())
            explanation["default"] = prediction_from_defaults(
                snapshot, table, case.entity, case.k, (excluded_ordinals, history_ordinals)
            )
        return explanation | {"sentence": explanation_sentence(explanation)}

    def _directory_fields(self, snapshot: Snapshot, record_key: RecordKey) -> dict[str, Any]:
        entity_set = snapshot.manifest.entity_sets[record_key.table.entity]
        hash_text = (
            f"{record_key.hash_or_digest:016x}"
            if isinstance(record_key.hash_or_digest, int)
            else record_key.hash_or_digest.hex()
        )
        return {
            "known": record_key.directory_position >= 0,
            "hash": hash_text,
            "seed": entity_set.seed,
            "position": record_key.directory_position if record_key.directory_position >= 0 else None,
            "entities": entity_set.count,
        }

    def _tier_fields(self, outcome: ReadResult | None) -> dict[str, Any]:
        if outcome is None:
            return {"found": False, "reason": "absent"}
        if isinstance(outcome, Miss):
            return {"found": False, "reason": outcome.reason.value}
        remaining_s = None if outcome.expires_at is None else outcome.expires_at - time.monotonic()
        return {"found": True, "by": "live" if outcome.is_live else "batch"} | (
            {} if remaining_s is None else {"expires_in_seconds": round(remaining_s, 3)}
        )

    async def _previous_fields(
        self, served: ServedGenerations, case: PendingAnswer, replay: LadderReplay
    ) -> dict[str, Any] | None:
        """Return the result of a read from the previous generation; None if no such generation is held."""
        previous = served.previous
        if previous is None:
            return None
        previous_report: dict[str, Any] = {"generation": previous.generation, "found": False, "reason": None}
        record_key = find_previous_record_key(previous, case)
        if isinstance(record_key, str):
            return previous_report | {"reason": record_key}
        outcome = await replay.read(previous.view, record_key)
        if isinstance(outcome, Miss):
            return previous_report | {"reason": outcome.reason.value}
        try:
            decode_record(record_key.table.layout, outcome.record, previous.items.count)
        except CorruptArtefact:
            return previous_report | {"reason": MissReason.CORRUPT}
        return previous_report | {"found": True}


def _event_fields(snapshot: Snapshot, counted_events: NewerInput | None) -> dict[str, Any] | None:
    """Return the events that the answer counts, and the generation's position; None without events."""
    generation_events = snapshot.part(GenerationEvents)
    if counted_events is None or generation_events is None:
        return None
    event_input = counted_events.event_input
    events = event_input.events if isinstance(event_input, EventInput) else ()
    return {
        "until": str(Position.from_number(generation_events.until_position_number)),
        "as_of": counted_events.newest_accepted_at,
        "counted": [
            {
                "item": event.item.decode(),
                "time": iso_time(event.at_us / 1e6),
                "position": str(Position.from_number(event.position_number)),
            }
            for event in events
        ],
    }


def _new_item_rows(case: PendingAnswer) -> list[dict[str, str]]:
    """Return the new items in the answer, and the positions of the events that introduced them."""
    listed_items = () if case.answer is None else case.answer.get("items") or ()
    number_by_item = {new_item.raw_id.decode(): new_item.position_number for new_item in case.new_items.items}
    return [
        {"item": item, "position": str(Position.from_number(number_by_item[item]))}
        for item in listed_items
        if item in number_by_item
    ]


def _answer_fields(case: PendingAnswer) -> dict[str, Any]:
    """Return the answer's source and reason, and why live did not answer."""
    answer = case.answer or {}
    reason = answer.get("reason")
    return {"tier": answer.get("source", Source.DEFAULT), "reason": reason and str(reason), "live": answer.get("live")}


def _list_fields(prediction: Prediction, record: Record, table: Table) -> dict[str, Any]:
    """Return the items of the stored list that pass the filter, and whether a lookup uses the list or vectors."""
    source = "vectors" if may_have_more_items(prediction, record, table) else "list"
    return {"items_of_list": prediction["items"], "from": source}


def _record_fields(record: Record, hit: Hit, prediction: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "by": "live" if is_live(hit.record) else "batch",
        "bytes": len(hit.record),
        "format": peek_format(hit.record),
        "fingerprint": f"{record.fingerprint:016x}",
        "scored_at": record.scored_at,
        "count": len(record.numbers),
        **prediction,
    }


def _has_same_record(l1_result: ReadResult | None, l2_result: ReadResult) -> bool | None:
    """True if both tiers hold the same bytes; None unless both hold a record."""
    if not isinstance(l1_result, Hit) or not isinstance(l2_result, Hit):
        return None
    return l1_result.record == l2_result.record


ComparedPrediction = Mapping[str, Any]


def prediction_difference(stored_prediction: ComparedPrediction, live_prediction: ComparedPrediction) -> dict[str, Any]:
    """Compare two predictions of one kind: lists, vectors or values.

    `exact`: the same items in the same order, or numbers equal to the bit. Scores have deltas (live minus stored) for
    items in both lists; `overlap` is the share of the longer list that is in both.
    """
    if "items" in stored_prediction:
        return _list_difference(
            stored_prediction["items"], stored_prediction["scores"], live_prediction["items"], live_prediction["scores"]
        )
    number_field = "vector" if "vector" in stored_prediction else "values"
    return _number_difference(np.asarray(stored_prediction[number_field]), np.asarray(live_prediction[number_field]))


def _list_difference(
    stored_items: Sequence[str],
    stored_scores: NDArray[np.float32],
    live_items: Sequence[str],
    live_scores: NDArray[np.float32],
) -> dict[str, Any]:
    stored_score_by_item = dict(zip(stored_items, map(float, stored_scores), strict=True))
    live_score_by_item = dict(zip(live_items, map(float, live_scores), strict=True))
    common_items = [item for item in stored_items if item in live_score_by_item]
    scores = (
        np.array([score_by_item[item] for item in common_items])
        for score_by_item in (live_score_by_item, stored_score_by_item)
    )
    k = max(len(stored_items), len(live_items))
    live_rank_by_item = {item: rank for rank, item in enumerate(live_items)}
    places_moved = [
        abs(rank - live_rank_by_item[item]) for rank, item in enumerate(stored_items) if item in live_rank_by_item
    ]
    return {
        "exact": list(stored_items) == list(live_items),
        "k": k,
        "overlap": overlap(stored_items, live_items, k),
        "only_stored": [item for item in stored_items if item not in live_score_by_item],
        "only_live": [item for item in live_items if item not in stored_score_by_item],
        "places_moved_max": max(places_moved, default=0),
        **_delta_fields(*scores),
    }


def _number_difference(stored_numbers: NDArray[np.float32], live_numbers: NDArray[np.float32]) -> dict[str, Any]:
    if stored_numbers.shape != live_numbers.shape:
        return {"exact": False, "sizes": [len(stored_numbers), len(live_numbers)]}
    return {
        "exact": bool(np.array_equal(stored_numbers, live_numbers)),
        "cosine": cosine(stored_numbers, live_numbers),
        **_delta_fields(live_numbers.astype(np.float64), stored_numbers),
    }


def _delta_fields(live_numbers: NDArray[np.float64], stored_numbers: NDArray[np.floating]) -> dict[str, float | None]:
    if not len(live_numbers):
        return {"delta_max": None, "delta_mean": None}
    errors = absolute_errors(live_numbers, stored_numbers)
    return {"delta_max": errors.largest_error, "delta_mean": errors.mean_error}


_OUTAGE_TEXTS = {
    MissReason.L2_DOWN: "Redis cannot be reached",
    MissReason.L2_TIMEOUT: "Redis does not answer in time",
    MissReason.BREAKER_OPEN: "Redis failed several times in a row and is not used for a moment",
}

_REASON_TEXTS = _OUTAGE_TEXTS | {
    MissReason.NOT_IN_GENERATION: "the night did not know it and no live answer is stored",
    MissReason.NEGATIVE: "the night did not know it and no live answer is stored",
    MissReason.EXPIRED: "its stored live answer has expired",
    MissReason.INPUT_CHANGED: "the stored answer was computed from another input",
    MissReason.PAGE_MISSING: "its page is not in Redis",
    MissReason.CORRUPT: "its record in Redis is damaged or belongs to another entity",
    MissReason.ENTITY_BLOCKED: "it is on the blocklist",
    MissReason.NEWER_EVENTS: "the user has newer events, and no answer with them is stored",
    MissReason.EXHAUSTED: "no item of its list is left",
}

_TIER_TEXTS = {
    Source.L1: "this process would answer from its own memory (L1)",
    Source.L2: "Redis would answer (L2)",
    Source.LIVE: "live inference would answer",
    Source.PREVIOUS: "the previous generation would answer",
    Source.DEFAULT: "the default, the same for all users, would answer",
}


def explanation_sentence(explanation: Mapping[str, Any]) -> str:
    """Return a sentence on the answering rung, why no higher one answers, and any defect of the stored record."""
    answer = explanation["answer"]
    clauses = [_TIER_TEXTS[answer["tier"]]]
    if (reason := answer["reason"]) is not None:
        clauses[0] += f", since {_REASON_TEXTS.get(reason, reason)}"
    if answer["live"]:
        clauses.append(f"live inference could not: {answer['live']}")
    elif answer["tier"] in FALLBACK_SOURCES and not explanation["model"]["computed_from"]:
        clauses.append("live inference needs a history or features")
    l2_reason = explanation["l2"].get("reason")
    if answer["tier"] == Source.L1 and l2_reason in _OUTAGE_TEXTS and reason is None:
        clauses.append(_OUTAGE_TEXTS[l2_reason])
    if (explanation["page"] or {}).get("state") == "damaged":
        clauses.append("its page in Redis is not the one that the night wrote: run larder restore")
    if explanation["same_bytes"] is False and explanation["record"] and explanation["record"]["by"] == "batch":
        clauses.append("L1 and Redis hold different records")
    difference = explanation["difference"]
    if difference is not None:
        clauses.append(_difference_text(difference, explanation["model"]["computed_from"]))
    joined_clauses = "; ".join(clauses)
    return f"{joined_clauses[0].upper()}{joined_clauses[1:]}."


def _difference_text(difference: Mapping[str, Any], computed_from: str) -> str:
    computed_by = {
        "sent": "the model, from what was sent,",
        "own": "the model",
        "events": "the model, from the night's input and newer events,",
        "stored_vector": "the stored vector",
    }[computed_from]
    if difference["exact"]:
        return f"{computed_by} gives the same now"
    if "overlap" not in difference:
        return f"{computed_by} differs by up to {difference.get('delta_max')} now"
    if difference["overlap"] == 1.0:
        return f"{computed_by} has the same items in another order now"
    return f"{computed_by} shares {difference['overlap']:.0%} of the items now"
