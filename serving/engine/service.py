"""Parts of the service that answer lookups, and the replica's state that every answer reports."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.admission.gate import AdmissionGate, DeadlineCheck
from serving.engine.ladder import Ladder
from serving.engine.rendering.answer_fields import AnswerJson
from serving.generations.pointer_follower import PointerFollower
from serving.generations.served_set import ServedGenerations
from serving.metrics.registry import Metrics
from serving.requests.errors import Problem
from serving.requests.models import Limits, LookupRequest
from serving.requests.parsing import HeaderJudge
from serving.traffic.canary import CanaryRouter

LookupFunction = Callable[[ServedGenerations, LookupRequest, float], Awaitable[list[AnswerJson]]]
"""Lookup: answers each entity of a request once, in order, from captured generations; the time is monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupService:
    """Parts between a request and its answer, with the bounds of requests.

    `reshaped` is the ladder's `lookup` for requests with a filter or a re-ranking. `l2_bound_s` returns how long a
    read of L2 may take now; without `observes` nothing is recorded for the dashboard.
    """

    follower: PointerFollower
    trial: CanaryRouter
    ladder: Ladder
    reshaped: LookupFunction
    metrics: Metrics
    limits: Limits
    body_bytes: int
    body_timeout_s: float
    tiers: TieredCache
    l2_bound_s: Callable[[], float]
    admission: Admission
    observes: bool = True
    timer: Callable[[], float] = time.monotonic

    def capture_served(self) -> ServedGenerations:
        """Return the generations for one request, captured once; raise Problem (503) before any is loaded."""
        served = self.follower.holder.served
        if served is None:
            reason = self.follower.failed or "no generation has been published yet"
            raise Problem(503, "not_ready", reason)
        return served

    def lookup(self, *, is_reshaped: bool) -> LookupFunction:
        """Return the lookup function for requests that reshape lists, or for the others."""
        return self.reshaped if is_reshaped else self.ladder.lookup

    def attach_staleness(self, answers: list[AnswerJson]) -> list[AnswerJson]:
        """Add the reason why this replica may lag behind, if any, to each answer; return the answers."""
        if (stale := self.follower.concerns.text) is not None:
            for answer in answers:
                answer["stale"] = stale
        return answers

    def gate(self) -> AdmissionGate:
        """Create the gate of requests below L1, with the service's bounds."""
        headers = HeaderJudge(self.limits)
        lateness = DeadlineCheck(self.admission, headers, self.limits)
        requested = self.metrics.requested
        return AdmissionGate(
            self.admission, headers, lateness, requested, self.body_bytes, self.body_timeout_s
        )
