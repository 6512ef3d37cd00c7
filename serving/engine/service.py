"""Parts of the service that answer lookups, and the replica's state that every answer reports."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.admission.gate import AdmissionGate, DeadlineCheck
from serving.engine.ladder import Ladder
from serving.engine.rendering.answer_fields import AnswerJson
from serving.generations.pointer_follower import PointerFollower
from serving.generations.served_set import ServedGenerations
from serving.metrics.registry import Metrics
from serving.requests.errors import Problem
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.options import Limits, RequestOptions
from serving.requests.parsing import HeaderReader

LookupFunction = Callable[[ServedGenerations, LookupRequest, float], Awaitable[list[AnswerJson]]]
"""Function that answers each entity of a request once, in order, from captured generations; the time is monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupService:
    """Parts of the service that answer requests, with the limits of requests.

    `l2_bound_s` returns how long a read of L2 may take now; without `observes_answers` nothing is recorded for the
    dashboard.
    """

    follower: PointerFollower
    ladder: Ladder
    metrics: Metrics
    limits: Limits
    body_bytes_max: int
    body_timeout_s: float
    tiers: TieredCache
    l2_bound_s: Callable[[], float]
    admission: Admission
    observes_answers: bool = True
    monotonic_clock: Callable[[], float] = time.monotonic

    def capture_served(self) -> ServedGenerations:
        """Return the generations for one request, captured once; raise Problem (503) before any is loaded."""
        served = self.follower.holder.served
        if served is None:
            problem_message = self.follower.load_failure or "no generation has been published yet"
            raise Problem(503, "not_ready", problem_message)
        return served

    def lookup(self, *, is_reshaped: bool) -> LookupFunction:
        """Return the lookup function for requests that reshape lists, or for the others."""
        return self.ladder.shaper.lookup if is_reshaped else self.ladder.lookup

    def attach_staleness(self, answers: list[AnswerJson]) -> list[AnswerJson]:
        """Add the reason why this replica may lag behind, if any, to each answer; return the answers."""
        if (stale := self.follower.concerns.reasons_text) is not None:
            for answer in answers:
                answer["stale"] = stale
        return answers

    def create_gate(self) -> AdmissionGate:
        """Create the gate of requests below L1, with the service's bounds."""
        header_reader = HeaderReader(self.limits)
        deadline_check = DeadlineCheck(self.admission, header_reader, self.limits)
        count_request = self.metrics.requested
        return AdmissionGate(
            self.admission, header_reader, deadline_check, count_request, self.body_bytes_max, self.body_timeout_s
        )


AnswersFinisher = Callable[[list[AnswerJson], bool], None]
"""Function of the answers of a request, and whether the caller chose their items; may add fields to the answers."""


class RoutedRequest(NamedTuple):
    """Route of a request: the service that answers it, its generations, and the finishers of the answers."""

    service: LookupService
    served: ServedGenerations | None = None
    """None: the generations that the service holds at the time of `capture_served`."""
    finishers: tuple[AnswersFinisher, ...] = ()
    """Called with the answers, in this order."""

    def capture_served(self) -> ServedGenerations:
        """Return the generations to answer from; raise Problem (503) before any is loaded."""
        return self.service.capture_served() if self.served is None else self.served

    def finish(self, answers: list[AnswerJson], *, is_of_candidates: bool = False) -> list[AnswerJson]:
        """Return the answers after all finishers; `is_of_candidates`: the caller chose their items."""
        for finisher in self.finishers:
            finisher(answers, is_of_candidates)
        return self.service.attach_staleness(answers)


Router = Callable[[RoutedRequest, Sequence[RequestedEntity], RequestOptions], RoutedRequest]
"""Router that may send a request, as left by the previous router, to another service or generation."""
