"""Prediction of the model for an entity now, beside what is stored: computed as for any request, kept nowhere."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cache.errors import CorruptArtefact
from cache.format.manifest import Table
from cache.format.records.codec import Record
from cache.tiers.inspector import TierInspector
from cache.tiers.results import Hit, MissReason
from serving.admission.controller import Admission
from serving.answers.reasons import LiveReason
from serving.generations.snapshot import Snapshot
from serving.lookup.entity import PendingAnswer, find_record_key
from serving.lookup.event_counting import new_items_of
from serving.lookup.micro_batcher import InferenceJob, LiveUnavailable, MicroBatcher
from serving.ranking.user_vectors import vector_table
from serving.requests.errors import Problem

LIVE_S = 2.0
"""Seconds that one inference may take, its wait included."""

log = logging.getLogger(__name__)

Input = Literal["sent", "own", "events", "stored_vector"]


@dataclass(frozen=True, slots=True)
class RescoreResult:
    """Result of a rescore: a record, or `reason` why there is none.

    `computed_from`: history or features that were sent, the item itself, the night's input of a user and newer events,
    or the vector that the night stored of the user. That one says how the items of the stored list score, not which
    others would be in it.
    """

    record: Record | None
    reason: str | None
    computed_from: Input | None
    seconds: float
    precision: str | None
    computed: bytes | None = None
    """The record as inference made it, from an input."""

    @property
    def is_of_input(self) -> bool:
        """True if a request would be answered by this, too."""
        return self.computed_from in ("sent", "own", "events")

    def to_json(self) -> dict[str, Any]:
        """Fields of the explanation, all but the prediction itself."""
        return {
            "computed_from": self.computed_from,
            "reason": self.reason,
            "seconds": round(self.seconds, 6),
            "precision": self.precision,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Rescorer:
    """Runs through the queue and the admission of live inference, so that it takes nothing from callers under load."""

    batcher: MicroBatcher
    admission: Admission
    looking: TierInspector

    async def rescore(
        self, snapshot: Snapshot, case: PendingAnswer, stored_record: Record | None
    ) -> RescoreResult:
        """Computes from the input of the case, else from the stored vector for the items of the stored list."""
        began_at = time.monotonic()
        precision = "fp32" if _input(case) == "events" else _precision(snapshot, case.table)
        if snapshot.predictor is None:
            return RescoreResult(None, LiveReason.NO_MODEL, _input(case), 0.0, None)
        record: Record | None = None
        computed: bytes | None = None
        reason: str | None = "nothing_to_compute_from"
        computed_from = _input(case)
        if case.may_compute(snapshot):
            record, computed, reason = await self._live(snapshot, case)
        elif computed_from is not None:  # blocked, or without a producer
            reason = case.reason if case.reason == MissReason.ENTITY_BLOCKED else "no_producer"
        elif stored_record is not None and stored_record.items is not None:
            record = await self._from_vector(snapshot, case, stored_record)
            if record is not None:
                reason, computed_from = None, "stored_vector"
        seconds = time.monotonic() - began_at
        return RescoreResult(record, reason, computed_from, seconds, precision, computed)

    async def _live(
        self, snapshot: Snapshot, case: PendingAnswer
    ) -> tuple[Record | None, bytes | None, str | None]:
        """The record, decoded and as it is, or why there is none."""
        if not self.admission.admit_live():
            return None, None, LiveReason.OVERLOADED
        job = InferenceJob(
            snapshot, case.table.name, case.live_input, case.record_key.fingerprint, case.size_bytes,
            time.monotonic() + LIVE_S,
            event_input=None if case.is_settled else case.counted_events and case.counted_events.input,
            new=new_items_of(snapshot, case), seen_ordinals=case.find_seen_ordinals(snapshot),
        )  # fmt: skip
        try:
            computed = await asyncio.wait_for(self.batcher.infer(job), LIVE_S)
            return case.decoded(snapshot, computed.record), computed.record, None
        except LiveUnavailable as error:
            return None, None, error.reason
        except TimeoutError:
            return None, None, LiveReason.TIMEOUT
        except Exception:  # the model is a guest
            log.warning("live inference for %s failed", case.table.name, exc_info=True)
            return None, None, LiveReason.FAILED

    async def _from_vector(
        self, snapshot: Snapshot, case: PendingAnswer, stored_record: Record
    ) -> Record | None:
        """The stored list, scored and ordered by the stored vector; None without one."""
        raw, items, predictor = case.entity.raw, stored_record.items, snapshot.predictor
        if raw is None or items is None or predictor is None or case.table.entity != "user":
            return None
        if not predictor.supports(case.table.name):
            return None
        try:
            table = vector_table(snapshot)
        except Problem:
            return None
        record_key = find_record_key(snapshot, table, raw)
        outcome = await self.looking.record(snapshot.view, record_key)
        if not isinstance(outcome, Hit):
            return None
        try:
            vector = PendingAnswer(
                case.entity, table, table.layout.width, record_key, case.digest
            ).decoded(snapshot, outcome.record)
        except CorruptArtefact:
            return None
        ordinals = items.astype(np.int64)
        scores = await asyncio.to_thread(
            predictor.score_vector, case.table.name, vector.numbers, ordinals
        )
        order = np.lexsort((ordinals, -scores))
        return stored_record._replace(numbers=scores[order], items=items[order])


def _input(case: PendingAnswer) -> Input | None:
    if case.counted_events is not None and not case.is_settled:
        return "events"
    if case.entity.has_input:
        return "sent"
    return None if case.own_ordinal is None else "own"


def _precision(snapshot: Snapshot, table: Table) -> str | None:
    predictor = snapshot.predictor
    return None if predictor is None else predictor.precisions.get(str(table.producer.model))
