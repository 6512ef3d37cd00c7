"""Routing of experiments: the arm's namespace that answers a whole request, and its counts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from serving.engine.rendering.answer_fields import AnswerJson
from serving.engine.service import LookupService, RoutedRequest
from serving.metrics.registry import counts_of
from serving.requests.errors import Problem
from serving.requests.models import FeedbackReport, RequestedEntity
from serving.requests.options import RequestedArm, RequestOptions
from serving.traffic.arms import Arms
from serving.traffic.canary import CanaryRouter, EventNames, key_of
from serving.traffic.exposures import ExposureLog

REQUESTS_OF_ARM, FEEDBACK_OF_ARM = "n:", "f:"
"""Beginnings of fields of counts as the dashboard adds them up."""


class ExperimentAssignment(NamedTuple):
    """Arm of an experiment that answers a request, and the key that chose it; None where the caller did.

    All of it is as the request was routed: the experiment may have been stopped when the answers are there.
    """

    experiment: str
    arm: str
    key: bytes | None
    is_sampled: bool = False
    """True if the key's exposures are written down."""


class ExperimentMetrics:
    """Counts of requests by the arms of experiments."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.requests = counter(
            "larder_experiment_requests", "Requests that an arm answered", ["experiment", "arm"]
        )
        self.answers = counter(
            "larder_experiment_answers",
            "Entities answered by source, by an arm",
            ["experiment", "arm", "source"],
        )
        self.version = Gauge(
            "larder_experiments_version",
            "The version of the experiments in force here",
            registry=registry,
        )
        self.feedback = counter(
            "larder_experiment_feedback",
            "What callers report, by arm of an experiment",
            ["experiment", "arm", "event"],
        )
        self.without_arm = counter(
            "larder_experiment_aside", "Requests in no arm while experiments are held", ["reason"]
        )

    def by_field(self) -> dict[str, int]:
        """Return the requests and feedback of arms, by the fields of the dashboard."""
        return {
            prefix + "=".join(labels[name] for name in names): int(count)
            for counter, prefix, names in (
                (self.requests, REQUESTS_OF_ARM, ("experiment", "arm")),
                (self.feedback, FEEDBACK_OF_ARM, ("experiment", "arm", "event")),
            )
            for labels, count in counts_of(counter)
        }


class ExperimentRouter:
    """Router of requests by the caller's key alone, so that all replicas choose the same namespace for a request."""

    def __init__(
        self,
        arms: Arms,
        exposures: ExposureLog,
        metrics: ExperimentMetrics,
        canary_of: Callable[[LookupService], CanaryRouter],
    ) -> None:
        """`canary_of`: router of the canaries in the namespace of a service."""
        self.exposures = exposures
        self._canary_of = canary_of
        self._arms = arms
        self._metrics = metrics
        self._events = EventNames()

    def route_request(
        self, routed: RoutedRequest, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> RoutedRequest:
        """Send a request to the namespace of its arm. Raise Problem (409) as `route` does."""
        if options.arm is None and self._arms.routing is None:
            return routed
        service, assigned = self.route(entities, options)
        if assigned is None:
            return routed._replace(service=service)
        finisher = partial(self.finish, assigned)
        return routed._replace(service=service, finishers=(finisher, *routed.finishers))

    def finish(
        self, assigned: ExperimentAssignment, answers: list[AnswerJson], _is_of_candidates: bool
    ) -> None:
        """Note the arm in the answers of a request, and count them."""
        self.attach_arm(assigned, answers)

    def route(
        self, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> tuple[LookupService, ExperimentAssignment | None]:
        """The service that answers the whole request, and the arm that it is; None for no arm.

        Raises Problem (409) for an arm that the caller names and that is not held here.
        """
        own_service, routing = self._arms.own_service, self._arms.routing
        if options.arm is not None:
            return self._forced(options.arm)
        if routing is None:
            return own_service, None
        if options.generation is not None:
            return self._without_arm(self._holder_of(options.generation), "pinned")
        key = key_of(own_service.capture_served(), entities, options)
        if key is None:
            return self._without_arm(own_service, "no_key")
        if (experiment_and_arm := routing.of(key)) is None:
            return self._without_arm(own_service, "not_in_experiment")
        name, arm = experiment_and_arm
        service = self._serving(name, arm)
        if service is None or not _can_answer(service, entities):
            return self._without_arm(own_service, "not_held")
        return service, ExperimentAssignment(name, arm, key, routing.is_sampled(name, key))

    def attach_arm(
        self, assigned: ExperimentAssignment | None, answers: list[AnswerJson]
    ) -> list[AnswerJson]:
        """The answers of a request, each with its arm, counted; without an arm as they are."""
        if assigned is None:
            return answers
        name, arm, key, _ = assigned
        for answer in answers:
            answer["experiment"], answer["arm"] = name, arm
        if key is not None:
            self._note(assigned, key)
            self._metrics.requests.labels(name, arm).inc()
            for answer in answers:
                self._metrics.answers.labels(name, arm, answer["source"]).inc()
        return answers

    def feedback(self, report: FeedbackReport) -> dict[str, str | None]:
        """Count a caller's report for the arm of an experiment and for that of a canary in its namespace."""
        service = self._arms.own_service
        experiment_and_arm: tuple[str, str] | None = report.arm
        if report.key is not None and (routing := self._arms.routing) is not None:
            experiment_and_arm = routing.of(report.key)
        elif report.generation is not None:
            service = self._holder_of(report.generation)
        if experiment_and_arm is not None:
            serving = self._running(*experiment_and_arm)
            service, experiment_and_arm = (
                (service, None) if serving is None else (serving, experiment_and_arm)
            )
        arm = None
        if report.arm is None:
            arm = self._canary_of(service).feedback(
                service.capture_served(), report.generation, report.key, report.event, report.count
            )
        if experiment_and_arm is None:
            return {"arm": arm}
        event = self._events.of(report.event)
        self.exposures.heard(*experiment_and_arm, event, report.count)
        self._metrics.feedback.labels(*experiment_and_arm, event).inc(report.count)
        return {"arm": arm, "experiment": "=".join(experiment_and_arm)}

    def _note(self, assigned: ExperimentAssignment, key: bytes) -> None:
        """Write a request down: no erased or blocked key, and none that the experiment's sample leaves out."""
        blocked = self._arms.own_service.follower.holder.blocklist
        is_logged = assigned.is_sampled and key not in blocked.users and key not in blocked.entities
        self.exposures.request(assigned.experiment, assigned.arm, key if is_logged else None)

    def _running(self, experiment: str, arm: str) -> LookupService | None:
        """The service of an arm of an experiment that runs."""
        routing = self._arms.routing
        held_experiment = None if routing is None else routing.experiments.get(experiment)
        return (
            self._serving(experiment, arm)
            if held_experiment is not None and held_experiment.is_running
            else None
        )

    def _forced(self, requested_arm: RequestedArm) -> tuple[LookupService, ExperimentAssignment]:
        service = self._serving(requested_arm.experiment, requested_arm.arm)
        if service is None:
            routing = self._arms.routing
            held_experiments = {} if routing is None else routing.experiments
            raise Problem(
                409, "arm_gone",
                f"no arm {requested_arm.arm!r} of an experiment {requested_arm.experiment!r} is held here",
                field="arm",
                held=[
                    f"{held_experiment.name}={arm.name}"
                    for held_experiment in held_experiments.values() for arm in held_experiment.arms
                ],
            )  # fmt: skip
        return service, ExperimentAssignment(requested_arm.experiment, requested_arm.arm, None)

    def _serving(self, experiment: str, arm: str) -> LookupService | None:
        """The service of an arm; None where that is not held."""
        routing = self._arms.routing
        held_experiment = None if routing is None else routing.experiments.get(experiment)
        held_arm = None if held_experiment is None else held_experiment.arm(arm)
        return None if held_arm is None else self._arms.service(held_arm.namespace)

    def _holder_of(self, generation: str) -> LookupService:
        """The namespace that has a pinned generation, the own one first; the own one if none has."""
        own_service = self._arms.own_service
        for service in (own_service, *self._arms.services):
            served = service.follower.served
            if served is not None and served.find(generation) is not None:
                return service
        return own_service

    def _without_arm(self, service: LookupService, reason: str) -> tuple[LookupService, None]:
        self._metrics.without_arm.labels(reason).inc()
        return service, None


def _can_answer(service: LookupService, entities: Sequence[RequestedEntity]) -> bool:
    """True if the namespace has every requested table: a later night of its own may have left one out."""
    tables = service.capture_served().live.manifest.tables
    return all(entity.table in tables for entity in entities)
