"""Replay of a lookup: the ladder itself over what was seen of each rung; nothing is kept, counted or asked again."""

import dataclasses
import time
from collections.abc import Sequence

from cache.tiers.inspector import TierInspector
from cache.tiers.results import OUTAGES, Hit, Miss, ReadResult, RecordKey, View
from serving.answers.reasons import LiveReason
from serving.explain.rescore import RescoreResult
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.lookup.answer_builder import RequestContext
from serving.lookup.entity import PendingAnswer
from serving.lookup.ladder import Ladder
from serving.lookup.micro_batcher import ComputedRecord, LiveUnavailable
from serving.metrics.registry import Metrics
from serving.requests.models import RequestOptions

_PLENTY_S = 3_600.0


class UncountedMetrics(Metrics):
    """Metrics of lookups that no caller asked for."""

    def stage(self, stage: str, seconds: float, entities: int = 0) -> None:
        """Ignores a stage: the request that wants an explanation has its own."""


class LadderReplay:
    """Tiers and inference of a ladder that answers one case from what was seen.

    `l1`, `l2` and `beside` (a live answer that stands in while a page is out of reach) are of the live generation.
    """

    def __init__(
        self,
        looking: TierInspector,
        l1: ReadResult | None,
        l2: ReadResult,
        live_result: ReadResult | None,
        rescore_result: RescoreResult,
    ) -> None:
        self._inspector = looking
        self._rescore_result = rescore_result
        self._result_by_key: dict[tuple[str, int | bytes], ReadResult] = {}
        stored_result = l2 if l1 is None else l1
        if (
            isinstance(stored_result, Miss)
            and stored_result.reason in OUTAGES
            and isinstance(live_result, Hit)
        ):
            stored_result = live_result._replace(reason=stored_result.reason)
        self.stored_result = stored_result

    async def answered(
        self,
        served: ServedGenerations,
        case: PendingAnswer,
        requested_options: RequestOptions,
        metrics: Metrics,
    ) -> PendingAnswer:
        """The case as the ladder leaves it: its answer has the source, `reason` says why it is no plain hit."""
        self._result_by_key[served.live.generation, case.record_key.key] = self.stored_result
        ladder = Ladder(self, self, metrics, l2_deadline_s=_PLENTY_S)
        options = dataclasses.replace(
            requested_options,
            deadline_s=_PLENTY_S,
            filter=None,
            rerank=None,
            max_events=0,  # the case counts them already
        )
        case = dataclasses.replace(case, reason=None)
        await ladder.resolve(served, [case], RequestContext.of(options, time.monotonic()))
        return case

    async def read(self, view: View, record_key: RecordKey) -> ReadResult:
        """The outcome of a look at both tiers, made once for each generation and record."""
        result_key = view.generation, record_key.key
        if result_key not in self._result_by_key:
            self._result_by_key[result_key] = await self._inspector.record(view, record_key)
        return self._result_by_key[result_key]

    async def get_many(
        self,
        view: View,
        record_keys: Sequence[RecordKey],
        deadline: float,  # noqa: ARG002 - what was seen waits for nobody
    ) -> Sequence[ReadResult]:
        """Outcomes as they were seen."""
        return [await self.read(view, record_key) for record_key in record_keys]

    def discard(self, view: View, record_key: RecordKey) -> None:
        """Keeps a damaged record where it is: somebody only looks."""

    def plan_overlay_reads(self, snapshot: Snapshot, cases: Sequence[PendingAnswer]) -> None:
        """Leaves nothing unread."""

    def note_repeat(self) -> None:
        """Counts nothing."""

    async def run(
        self,
        snapshot: Snapshot,  # noqa: ARG002
        cases: Sequence[PendingAnswer],
        limit_s: float,  # noqa: ARG002
    ) -> Sequence[ComputedRecord | LiveUnavailable]:
        """Outcome of the inference that was run already."""
        computed, reason = self._rescore_result.computed, self._rescore_result.reason
        return [
            LiveUnavailable(reason or LiveReason.FAILED)
            if computed is None
            else ComputedRecord(computed)
            for _ in cases
        ]
