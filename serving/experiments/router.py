"""Experiments at work: which arm's namespace answers a request, whole, and what is counted of it."""

from collections.abc import Sequence
from typing import NamedTuple

from serving.experiments.arms import Arms
from serving.experiments.exposures import ExposureLog
from serving.lookup.service import LookupService
from serving.metrics.registry import Metrics
from serving.rendering.answer_fields import Answer
from serving.replica.canary_router import key_of
from serving.replica.canary_stats import EventNames
from serving.requests.errors import Problem
from serving.requests.models import Reported, RequestedArm, RequestedEntity, RequestOptions


class Assigned(NamedTuple):
    """Arm of an experiment that answers a request, and the key that chose it; None where the caller did.

    All of it is as the request was routed: the experiment may have been stopped when the answers are there.
    """

    experiment: str
    arm: str
    key: bytes | None
    is_sampled: bool = False
    """True if the key's exposures are written down."""


class ExperimentRouter:
    """Routes by the caller's key alone, so that every replica sends the same requests to the same namespace."""

    def __init__(self, arms: Arms, exposures: ExposureLog, metrics: Metrics) -> None:
        self.exposures = exposures
        self._arms = arms
        self._metrics = metrics
        self._events = EventNames()

    def route(
        self, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> tuple[LookupService, Assigned | None]:
        """The service that answers the whole request, and the arm that it is; None for no arm.

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
        return service, Assigned(name, arm, key, routing.is_sampled(name, key))

    def mark(self, assigned: Assigned | None, answers: list[Answer]) -> list[Answer]:
        """The answers of a request, each with its arm, counted; without an arm as they are."""
        if assigned is None:
            return answers
        name, arm, key, _ = assigned
        for each in answers:
            each["experiment"], each["arm"] = name, arm
        if key is not None:
            self._note(assigned, key)
            self._metrics.experiment_requests.labels(name, arm).inc()
            for each in answers:
                self._metrics.experiment_answers.labels(name, arm, each["source"]).inc()
        return answers

    def feedback(self, told: Reported) -> dict[str, str | None]:
        """Counts what a caller reports, for the arm of an experiment and for that of a canary in its namespace."""
        service = self._arms.own
        found: tuple[str, str] | None = told.arm
        if told.key is not None and (routing := self._arms.routing) is not None:
            found = routing.of(told.key)
        elif told.generation is not None:
            service = self._holder_of(told.generation)
        if found is not None:
            serving = self._running(*found)
            service, found = (service, None) if serving is None else (serving, found)
        arm = None
        if told.arm is None:
            arm = service.trial.feedback(
                service.holding(), told.generation, told.key, told.event, told.count
            )
        if found is None:
            return {"arm": arm}
        event = self._events.of(told.event)
        self.exposures.heard(*found, event, told.count)
        self._metrics.experiment_feedback.labels(*found, event).inc(told.count)
        return {"arm": arm, "experiment": "=".join(found)}

    def _note(self, assigned: Assigned, key: bytes) -> None:
        """Write a request down: no erased or blocked key, and none that the experiment's sample leaves out."""
        blocked = self._arms.own.follower.shelf.blocklist
        is_logged = assigned.is_sampled and key not in blocked.users and key not in blocked.entities
        self.exposures.request(assigned.experiment, assigned.arm, key if is_logged else None)

    def _running(self, experiment: str, arm: str) -> LookupService | None:
        """The service of an arm of an experiment that runs."""
        routing = self._arms.routing
        known = None if routing is None else routing.experiments.get(experiment)
        return self._serving(experiment, arm) if known is not None and known.is_running else None

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
        """The service of an arm; None where that is not held."""
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
