"""Experiments at work: which arm's namespace answers a request, whole, and what is counted of it."""

from collections.abc import Sequence
from typing import NamedTuple

from serving.experiments.arms import Arms
from serving.lookup.service import LookupService
from serving.metrics.registry import Metrics
from serving.rendering.answer_fields import Answer
from serving.replica.canary_router import key_of
from serving.requests.errors import Problem
from serving.requests.models import RequestedArm, RequestedEntity, RequestOptions


class Assigned(NamedTuple):
    """Arm of an experiment that answers a request, and the key that chose it; None where the caller did."""

    experiment: str
    arm: str
    key: bytes | None


class ExperimentRouter:
    """Routes by the caller's key alone, so that every replica sends the same requests to the same namespace."""

    def __init__(self, arms: Arms, metrics: Metrics) -> None:
        self._arms = arms
        self._metrics = metrics

    def route(
        self, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> tuple[LookupService, Assigned | None]:
        """What answers the whole request, and the arm that it is; None for no arm.

        Raises Problem (409) for an arm that the caller names and that is not held here.
        """
        own, routing = self._arms.own, self._arms.routing
        if options.arm is not None:
            return self._forced(options.arm)
        if routing is None:
            return own, None
        if options.generation is not None:
            return self._aside(self._holder_of(options.generation), "pinned")
        key = key_of(own.holding(), entities, options)
        if key is None:
            return self._aside(own, "no_key")
        if (found := routing.of(key)) is None:
            return self._aside(own, "not_in_experiment")
        name, arm = found
        service = self._serving(name, arm)
        if service is None or not _can_answer(service, entities):
            return self._aside(own, "not_held")
        return service, Assigned(name, arm, key)

    def mark(self, assigned: Assigned | None, answers: list[Answer]) -> list[Answer]:
        """The answers of a request, each with its arm, counted; without an arm as they are."""
        if assigned is None:
            return answers
        name, arm, key = assigned
        for each in answers:
            each["experiment"], each["arm"] = name, arm
        if key is not None:
            self._metrics.experiment_requests.labels(name, arm).inc()
            for each in answers:
                self._metrics.experiment_answers.labels(name, arm, each["source"]).inc()
        return answers

    def _forced(self, asked: RequestedArm) -> tuple[LookupService, Assigned]:
        service = self._serving(asked.experiment, asked.arm)
        if service is None:
            routing = self._arms.routing
            known = {} if routing is None else routing.experiments
            raise Problem(
                409, "arm_gone", f"no arm {asked.arm!r} of an experiment {asked.experiment!r} is held here",
                field="arm",
                held=[f"{each.name}={arm.name}" for each in known.values() for arm in each.arms],
            )  # fmt: skip
        return service, Assigned(asked.experiment, asked.arm, None)

    def _serving(self, experiment: str, arm: str) -> LookupService | None:
        """What answers for an arm; None where that is not held."""
        routing = self._arms.routing
        known = None if routing is None else routing.experiments.get(experiment)
        found = None if known is None else known.arm(arm)
        return None if found is None else self._arms.service(found.namespace)

    def _holder_of(self, generation: str) -> LookupService:
        """The namespace that has a pinned generation, the own one first; the own one if none has."""
        own = self._arms.own
        for service in (own, *self._arms.services):
            held = service.follower.holding
            if held is not None and held.find(generation) is not None:
                return service
        return own

    def _aside(self, service: LookupService, why: str) -> tuple[LookupService, None]:
        self._metrics.experiment_aside.labels(why).inc()
        return service, None


def _can_answer(service: LookupService, entities: Sequence[RequestedEntity]) -> bool:
    """True if the namespace has every table asked for: a later night of its own may have left one out."""
    tables = service.holding().live.manifest.tables
    return all(each.table in tables for each in entities)
