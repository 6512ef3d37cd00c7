"""Explanation of an entity's answer: what each rung holds of it, which would answer, and what live would say now."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache.errors import CorruptArtefact
from cache.events.position import Position
from cache.filters.masks import FilterMask
from cache.filters.reranking import Reranker
from cache.format.manifest import Table
from cache.format.records.codec import Record, decode
from cache.format.records.layout import is_live, peek_format
from cache.l2.data_plane import DataPlane
from cache.store.artefacts import ArtefactStore
from cache.tiers.inspector import TierInspector
from cache.tiers.results import Hit, Miss, MissReason, ReadResult, RecordKey
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.answers.sources import STORED_SOURCES, Source
from serving.explain.difference import difference
from serving.explain.page_check import PageChecks
from serving.explain.replay import LadderReplay, UncountedMetrics
from serving.explain.rescore import Rescorer, RescoreResult
from serving.explain.summary import sentence
from serving.fresh.newer_events import CountedEvents, NewerEvents, iso_of
from serving.generations.pointer_follower import PointerFollower
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.generations.store_threads import InThread
from serving.lookup.entity import PendingAnswer, build_pending_answers, find_previous_record_key
from serving.lookup.event_counting import count_newer
from serving.lookup.micro_batcher import MicroBatcher
from serving.ranking.filters import Filters
from serving.rendering.answer_fields import Prediction, from_defaults, from_record, is_cut
from serving.requests.errors import Problem, unprocessable
from serving.requests.models import LookupRequest

AT_ONCE = 2
"""Explanations under way: each reads a whole page, and runs the model."""


class Explainer:
    """Looks without changing anything: no record is kept, no answer counted."""

    def __init__(
        self,
        follower: PointerFollower,
        tiers: TieredCache,
        remote: DataPlane,
        batcher: MicroBatcher,
        admission: Admission,
        store: ArtefactStore,
        filters: Filters,
        newer_events: NewerEvents,
        *,
        in_thread: InThread,
    ) -> None:
        self._follower = follower
        self._inspector = looking = TierInspector(tiers, remote)
        self._pages = PageChecks(looking, remote.control.keyspace, store, in_thread)
        self._rescorer = Rescorer(batcher, admission, looking)
        self._filters = filters
        self._newer_events = newer_events
        self._under_way = 0
        self._uncounted_metrics = UncountedMetrics()

    async def explain(self, served: ServedGenerations, request: LookupRequest) -> dict[str, Any]:
        """Explains the one entity asked; raises Problem for several, for what never can be answered, and when busy."""
        if len(request.entities) != 1:
            raise unprocessable("batch_too_long", "one entity is explained at a time", "entities")
        if self._under_way >= AT_ONCE:
            raise Problem(503, "overloaded", f"{AT_ONCE} explanations are under way here")
        self._under_way += 1
        try:
            return await self._build_explanation(served.pinned(request.options.generation), request)
        finally:
            self._under_way -= 1

    async def _build_explanation(
        self, served: ServedGenerations, request: LookupRequest
    ) -> dict[str, Any]:
        snapshot = served.live
        (case,) = await build_pending_answers(snapshot, request)

        async def read_records(record_keys: Sequence[RecordKey]) -> Sequence[ReadResult]:
            return [
                await self._inspector.record(snapshot.view, record_key)
                for record_key in record_keys
            ]

        await count_newer(self._newer_events, snapshot, [case], request.options, read_records)
        deadline = time.monotonic() + request.options.deadline_s
        filter_mask = await self._filters.evaluate(snapshot, request.options.filter, deadline)
        reranker = await self._filters.reranker(snapshot, request.options.rerank, deadline)
        table, night_key, raw, requested_key = (
            case.table,
            case.nightly_key,
            case.entity.raw,
            case.record_key,
        )
        view = snapshot.view
        l1, l2 = (
            self._inspector.l1(view, requested_key),
            await self._inspector.l2(view, requested_key),
        )
        live_result = self._inspector.find_stand_in(view, requested_key)
        excluded_ordinals = (
            case.history_in(snapshot).item_numbers if table.kind == "topk" else frozenset()
        )
        if case.counted_events is not None:
            excluded_ordinals |= frozenset(snapshot.numbers_of(case.counted_events.items).tolist())
        records = RecordDecoder(snapshot, case, excluded_ordinals)
        if snapshot.blocks(table, raw):
            case.reason = "entity_blocked"
        night_record_and_hit = records.find_nightly_record(l1, l2)
        rescore_result = await self._rescorer.rescore(
            snapshot, case, night_record_and_hit and night_record_and_hit[0]
        )
        replay = LadderReplay(self._inspector, l1, l2, live_result, rescore_result)
        answered = await replay.answered(served, case, request.options, self._uncounted_metrics)
        previous = await self._previous(served, answered, replay)
        answer = _answer(answered, rescore_result)
        is_stored = answer["tier"] in STORED_SOURCES
        answer_read_result = await replay.read(view, answered.record_key) if is_stored else None
        explanation: dict[str, Any] = {
            "table": table.name,
            "id": case.entity.id,
            "generation": snapshot.generation,
            "epoch": snapshot.epoch,
            "published_at": snapshot.published_at,
            "age_seconds": round(time.time() - snapshot.manifest.data_until, 3),
            "stale": self._follower.stale,
            "degraded": snapshot.degraded,
            "answer": answer,
            "directory": self._directory(snapshot, night_key),
            "events": _events(snapshot, case.counted_events),
            "new_items": _new_items(answered),
            "page": await self._pages.check_page(snapshot, night_key.table, night_key)
            if night_key.position >= 0
            else None,
            "l1": self._tier(l1),
            "l2": self._tier(l2),
            "same_bytes": _has_same_record(l1, l2),
            "record": None,
            "filter": filter_mask and {"passing": filter_mask.count, "items": snapshot.numbered},
            "rerank": request.options.rerank and {"by": request.options.rerank.named},
            "previous": previous,
            "model": rescore_result.to_json(),
            "difference": None,
        }
        shown_record_and_hit = night_record_and_hit or records.find_readable_record(
            answer_read_result, l1, l2
        )
        live_prediction = (
            None if rescore_result.record is None else records.prediction(rescore_result.record)
        )
        explanation["model"] |= live_prediction or {}
        if shown_record_and_hit is not None:
            prediction = records.prediction(shown_record_and_hit[0])
            explanation["record"] = _record(*shown_record_and_hit, prediction)
            if filter_mask is not None and shown_record_and_hit[0].items is not None:
                explanation["filter"] |= _within(
                    records.prediction(shown_record_and_hit[0], filter_mask),
                    shown_record_and_hit[0],
                    table,
                )
                explanation["filter"] |= {"table": night_key.table.name}
            if reranker is not None and shown_record_and_hit[0].items is not None:
                within = records.prediction(shown_record_and_hit[0], filter_mask, reranker)
                explanation["rerank"] |= {"items_of_list": within["items"]}
            if live_prediction is not None and night_key.table is table:
                explanation["difference"] = difference(prediction, live_prediction)
        if answer["tier"] == Source.DEFAULT and raw is not None:
            history_ordinals = frozenset(answered.find_seen_ordinals(snapshot).tolist())
            explanation["default"] = from_defaults(
                snapshot, table, case.entity, case.k, (excluded_ordinals, history_ordinals)
            )
        return explanation | {"sentence": sentence(explanation)}

    def _directory(self, snapshot: Snapshot, record_key: RecordKey) -> dict[str, Any]:
        entities = snapshot.manifest.entity_sets[record_key.table.entity]
        hash_ = (
            f"{record_key.key:016x}" if isinstance(record_key.key, int) else record_key.key.hex()
        )
        return {
            "known": record_key.position >= 0,
            "hash": hash_,
            "seed": entities.seed,
            "position": record_key.position if record_key.position >= 0 else None,
            "entities": entities.count,
        }

    def _tier(self, outcome: ReadResult | None) -> dict[str, Any]:
        if outcome is None:
            return {"found": False, "reason": "absent"}
        if isinstance(outcome, Miss):
            return {"found": False, "reason": outcome.reason.value}
        left_s = None if outcome.expires_at is None else outcome.expires_at - time.monotonic()
        return {"found": True, "by": "live" if outcome.live else "batch"} | (
            {} if left_s is None else {"expires_in_seconds": round(left_s, 3)}
        )

    async def _previous(
        self, served: ServedGenerations, case: PendingAnswer, replay: LadderReplay
    ) -> dict[str, Any] | None:
        """Result of a read from the previous generation; None where none is held."""
        previous = served.previous
        if previous is None:
            return None
        previous_report: dict[str, Any] = {
            "generation": previous.generation,
            "found": False,
            "reason": None,
        }
        record_key = find_previous_record_key(previous, case)
        if isinstance(record_key, str):
            return previous_report | {"reason": record_key}
        outcome = await replay.read(previous.view, record_key)
        if isinstance(outcome, Miss):
            return previous_report | {"reason": outcome.reason.value}
        try:
            decode(record_key.table.layout, outcome.record, previous.items.count)
        except CorruptArtefact:
            return previous_report | {"reason": MissReason.CORRUPT}
        return previous_report | {"found": True}


def _events(snapshot: Snapshot, counted_events: CountedEvents | None) -> dict[str, Any] | None:
    """Events that the answer counts, and the position up to which the generation has them; None without any."""
    if counted_events is None or snapshot.events is None:
        return None
    return {
        "until": str(Position.of_number(snapshot.events.until_number)),
        "as_of": counted_events.as_of,
        "counted": [
            {
                "item": event.item.decode(),
                "time": iso_of(event.at_us / 1e6),
                "position": str(Position.of_number(event.number)),
            }
            for event in counted_events.input.events
        ],
    }


def _new_items(case: PendingAnswer) -> list[dict[str, str]]:
    """New items in the answer, and the positions that brought them."""
    named = () if case.answer is None else case.answer.get("items") or ()
    number_by_item = {new_item.raw.decode(): new_item.number for new_item in case.new_items.items}
    return [
        {"item": item, "position": str(Position.of_number(number_by_item[item]))}
        for item in named
        if item in number_by_item
    ]


def _answer(case: PendingAnswer, rescore_result: RescoreResult) -> dict[str, Any]:
    """The source of the answer, why it is no plain hit, and why live gave none although it had an input."""
    source = "default" if case.answer is None else case.answer["source"]
    is_stored = source in STORED_SOURCES
    reason = None if case.answer is None else case.answer.get("reason")
    live = rescore_result.reason if rescore_result.is_of_input and not is_stored else None
    return {"tier": source, "reason": reason and str(reason), "live": live}


@dataclass(frozen=True, slots=True, eq=False)
class RecordDecoder:
    """Records that were seen of one case, as they would be answered."""

    snapshot: Snapshot
    case: PendingAnswer
    exclusions: frozenset[int]

    def find_nightly_record(self, *outcomes: ReadResult | None) -> tuple[Record, Hit] | None:
        """The record that the night computed, from the first tier that has it."""
        return next(
            (
                record_and_hit
                for record_and_hit in self._readable(outcomes)
                if not record_and_hit[1].live
            ),
            None,
        )

    def find_readable_record(self, *outcomes: ReadResult | None) -> tuple[Record, Hit] | None:
        """The first record that can be read."""
        return next(iter(self._readable(outcomes)), None)

    def prediction(
        self,
        record: Record,
        filter_mask: FilterMask | None = None,
        reranker: Reranker | None = None,
    ) -> Prediction:
        """Prediction as it would be answered: without what is blocked, seen, filtered out or beyond `k`."""
        case, exclusions = self.case, (self.exclusions,)
        return from_record(
            self.snapshot, case.table, record, case.k, exclusions, filter_mask, reranker
        )

    def _readable(self, outcomes: tuple[ReadResult | None, ...]) -> list[tuple[Record, Hit]]:
        hits = [read_result for read_result in outcomes if isinstance(read_result, Hit)]
        decoded = [(self._decoded(hit), hit) for hit in hits]
        return [(record, hit) for record, hit in decoded if record is not None]

    def _decoded(self, hit: Hit) -> Record | None:
        try:
            return self.case.decoded(self.snapshot, hit.record)
        except CorruptArtefact:
            return None


def _within(prediction: Prediction, record: Record, table: Table) -> dict[str, Any]:
    """Items of the stored list that pass the filter, and what a lookup answers from: that, or vectors."""
    source = "vectors" if is_cut(prediction, record, table) else "list"
    return {"items_of_list": prediction["items"], "from": source}


def _record(record: Record, hit: Hit, prediction: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "by": "live" if is_live(hit.record) else "batch",
        "bytes": len(hit.record),
        "format": peek_format(hit.record),
        "fingerprint": f"{record.fingerprint:016x}",
        "scored_at": record.scored_at,
        "count": len(record.numbers),
        **prediction,
    }


def _has_same_record(l1: ReadResult | None, l2: ReadResult) -> bool | None:
    """True if both tiers hold the same bytes; None unless both hold something."""
    if not isinstance(l1, Hit) or not isinstance(l2, Hit):
        return None
    return l1.record == l2.record
