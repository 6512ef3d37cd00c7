"""A canary at work: which requests it answers, and what is counted of both arms."""

from collections.abc import Sequence
from typing import Any, Protocol

from cache.store.releases import Canary
from serving.generations.served_set import ServedGenerations
from serving.metrics.registry import Metrics
from serving.rendering.answer_fields import AnswerJson
from serving.replica.canary_stats import ARMS, Arm, ArmCounts, CanaryAssignment, EventNames
from serving.requests.models import RequestedEntity, RequestOptions


class CanaryHolder(Protocol):
    """Protocol of what knows the canary that runs now."""

    canary: Canary | None
    """None while there is none."""


class CanaryRouter:
    """Routes by the caller's key alone, so that every replica sends the same requests to the same generation."""

    def __init__(self, running: CanaryHolder, metrics: Metrics) -> None:
        self._running = running
        self._metrics = metrics
        self._counted_canary: Canary | None = None
        self._counts: dict[Arm, ArmCounts] = {}
        self._events = EventNames()

    def route(
        self,
        served: ServedGenerations,
        entities: Sequence[RequestedEntity],
        options: RequestOptions,
    ) -> tuple[ServedGenerations, CanaryAssignment | None]:
        """Holding that answers the whole request, and the arm and key by which it is counted; None for neither arm."""
        if (canary := self._running.canary) is None:
            return served, None
        if options.generation is not None:
            return self._without_arm(served, "pinned")
        key = key_of(served, entities, options)
        if key is None:
            return self._without_arm(served, "no_key")
        if served.canary is None or served.next is None:
            return self._without_arm(served, "not_held")
        self._begin(canary)
        if served.canary.has_key(key):
            return served.for_canary(served.next), CanaryAssignment("canary", key, canary)
        return served, CanaryAssignment("live", key, canary)

    def count(self, part: CanaryAssignment | None, answers: Sequence[AnswerJson]) -> None:
        """Count a request of one arm that has its answers.

        One that was routed under another canary, or another share, does not count for the one that runs now.
        """
        if part is None:
            return
        arm, key, canary = part
        self._metrics.canary_requests.labels(arm).inc()
        for answer in answers:
            self._metrics.canary_answers.labels(arm, answer["source"]).inc()
        if canary != self._counted_canary:
            return
        for top in self._counts[arm].answered(key, answers):
            self._metrics.canary_top_score.labels(arm).observe(top)

    def feedback(
        self,
        served: ServedGenerations,
        generation: str | None,
        key: bytes | None,
        event: str,
        count: int,
    ) -> Arm | None:
        """Counts what a caller reports of answers of a generation, or to a key; the arm, None if it is neither."""
        canary = self._running.canary
        if canary is None or served.canary is None:
            return None
        self._begin(canary)
        if generation is not None:
            arms: dict[str, Arm] = {served.live.generation: "live", canary.generation: "canary"}
            arm = arms.get(generation)
        else:
            arm = "canary" if key is not None and served.canary.has_key(key) else "live"
        if arm is not None:
            self._counts[arm].heard(event, count)
            self._metrics.feedback.labels(arm, self._events.of(event, canary.event)).inc(count)
        return arm

    def report(self) -> dict[str, Any] | None:
        """Counts of both arms that the heartbeat carries while a canary runs; None while none does."""
        if (canary := self._running.canary) is None:
            return None
        self._begin(canary)
        return {
            "generation": canary.generation,
            "percent": canary.percent,
            "since": canary.since,
            "arms": {arm: counts.to_json() for arm, counts in self._counts.items()},
        }

    def _begin(self, canary: Canary) -> None:
        if (
            canary != self._counted_canary
        ):  # another one, or another share: what was counted is not comparable
            self._counted_canary, self._counts = (
                canary,
                {arm: ArmCounts(canary.event) for arm in ARMS},
            )

    def _without_arm(
        self, served: ServedGenerations, reason: str
    ) -> tuple[ServedGenerations, None]:
        self._metrics.canary_requests.labels(reason).inc()
        return served, None


def key_of(
    served: ServedGenerations, entities: Sequence[RequestedEntity], options: RequestOptions
) -> bytes | None:
    """Key by which a request is assigned: the caller's, else the one user that it is about."""
    if options.canary_key is not None:
        return options.canary_key
    if len(entities) != 1:
        return None
    table = served.live.manifest.tables.get(entities[0].table)
    return entities[0].raw if table is not None and table.entity == "user" else None
