"""The parts that answer a lookup, and what every answer has to know of the replica."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cache.tiers.tiered import Tiered
from serving.admission.controller import Admission
from serving.admission.deadline_check import Lateness
from serving.admission.gate import AdmissionGate
from serving.generations.pointer_follower import Follower
from serving.generations.served_set import Holding
from serving.lookup.ladder import Ladder
from serving.metrics.registry import Metrics
from serving.rendering.answer_fields import Answer
from serving.replica.canary_router import CanaryRouter
from serving.requests.errors import Problem
from serving.requests.fast_parse import Headers
from serving.requests.models import Ask, Limits

Lookup = Callable[[Holding, Ask, float], Awaitable[list[Answer]]]
"""Answers each entity of a request once, in order, from what was held when it came, at a monotonic time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupService:
    """The running parts between a request and its answer, with the bounds of what a request may ask for.

    `reshaped` is the ladder's `lookup` for who asks under a filter or in another order. `l2_bound_s` tells how long a
    read of L2 may take now; without `observes` nothing is noted for the dashboard.
    """

    follower: Follower
    trial: CanaryRouter
    ladder: Ladder
    reshaped: Lookup
    metrics: Metrics
    limits: Limits
    body_bytes: int
    body_timeout_s: float
    tiers: Tiered
    l2_bound_s: Callable[[], float]
    admission: Admission
    observes: bool = True
    timer: Callable[[], float] = time.monotonic

    def holding(self) -> Holding:
        """The generations to answer one request from, captured once; raises Problem (503) before any is loaded."""
        served = self.follower.shelf.holding
        if served is None:
            reason = self.follower.failed or "no generation has been published yet"
            raise Problem(503, "not_ready", reason)
        return served

    def lookup(self, *, is_reshaped: bool) -> Lookup:
        """The way to answer a request, by whether its options reshape lists."""
        return self.reshaped if is_reshaped else self.ladder.lookup

    def marked(self, answers: list[Answer]) -> list[Answer]:
        """The answers, each with why this replica may lag behind, if it may."""
        if (stale := self.follower.concerns.text) is not None:
            for answer in answers:
                answer["stale"] = stale
        return answers

    def gate(self) -> AdmissionGate:
        """The gate before all that lies below L1, with the service's bounds."""
        headers = Headers(self.limits)
        lateness = Lateness(self.admission, headers, self.limits)
        requested = self.metrics.requested
        return AdmissionGate(
            self.admission, headers, lateness, requested, self.body_bytes, self.body_timeout_s
        )
