"""Replay of a lookup: the ladder itself over what was seen of each rung; nothing is kept, counted or asked again."""

import dataclasses
import time
from collections.abc import Sequence

from cache.tiers.inspector import Looking
from cache.tiers.results import OUTAGES, Found, Missed, Outcome, View, Want
from serving.answers.reasons import LiveReason
from serving.explain.rescore import Said
from serving.generations.served_set import Holding
from serving.generations.snapshot import Snapshot
from serving.lookup.answer_builder import Turn
from serving.lookup.entity import Case
from serving.lookup.ladder import Ladder
from serving.lookup.micro_batcher import Computed, LiveUnavailable
from serving.metrics.registry import Metrics
from serving.requests.models import RequestOptions

_PLENTY_S = 3_600.0


class Unheard(Metrics):
    """Metrics of lookups that no caller asked for."""

    def stage(self, stage: str, seconds: float, entities: int = 0) -> None:
        """Ignores a stage: the request that wants an explanation has its own."""


class Replay:
    """Tiers and inference of a ladder that answers one case from what was seen.

    `l1`, `l2` and `beside` (a live answer that stands in while a page is out of reach) are of the live generation.
    """

    def __init__(
        self,
        looking: Looking,
        l1: Outcome | None,
        l2: Outcome,
        live_result: Outcome | None,
        rescore_result: Said,
    ) -> None:
        self._looking = looking
        self._said = rescore_result
        self._seen: dict[tuple[str, int | bytes], Outcome] = {}
        stored_result = l2 if l1 is None else l1
        if (
            isinstance(stored_result, Missed)
            and stored_result.reason in OUTAGES
            and isinstance(live_result, Found)
        ):
            stored_result = live_result._replace(reason=stored_result.reason)
        self.stored = stored_result

    async def answered(
        self, served: Holding, case: Case, requested_options: RequestOptions, metrics: Metrics
    ) -> Case:
        """The case as the ladder leaves it: its answer has the source, `reason` says why it is no plain hit."""
        self._seen[served.live.generation, case.want.key] = self.stored
        ladder = Ladder(self, self, metrics, l2_deadline_s=_PLENTY_S)
        options = dataclasses.replace(
            requested_options,
            deadline_s=_PLENTY_S,
            filter=None,
            rerank=None,
            max_events=0,  # the case counts them already
        )
        case = dataclasses.replace(case, reason=None)
        await ladder.resolve(served, [case], Turn.of(options, time.monotonic()))
        return case

    async def look(self, view: View, record_key: Want) -> Outcome:
        """The outcome of a look at both tiers, made once for each generation and record."""
        result_key = view.generation, record_key.key
        if result_key not in self._seen:
            self._seen[result_key] = await self._looking.record(view, record_key)
        return self._seen[result_key]

    async def get_many(
        self,
        view: View,
        record_keys: Sequence[Want],
        deadline: float,  # noqa: ARG002 - what was seen waits for nobody
    ) -> Sequence[Outcome]:
        """Outcomes as they were seen."""
        return [await self.look(view, record_key) for record_key in record_keys]

    def discard(self, view: View, record_key: Want) -> None:
        """Keeps a damaged record where it is: somebody only looks."""

    def approach(self, snapshot: Snapshot, cases: Sequence[Case]) -> None:
        """Leaves nothing unread."""

    def found_again(self) -> None:
        """Counts nothing."""

    async def run(
        self,
        snapshot: Snapshot,  # noqa: ARG002
        cases: Sequence[Case],
        limit_s: float,  # noqa: ARG002
    ) -> Sequence[Computed | LiveUnavailable]:
        """Outcome of the inference that was run already."""
        computed, reason = self._said.computed, self._said.reason
        return [
            LiveUnavailable(reason or LiveReason.FAILED) if computed is None else Computed(computed)
            for _ in cases
        ]
