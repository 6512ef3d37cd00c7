"""Routing of experiments: selection of the namespace that answers a request, and counts by arm."""

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
from serving.traffic.arms import ArmHolder
from serving.traffic.canary import CanaryRouter, EventNames, assignment_key
from serving.traffic.exposures import ExposureLog

ARM_REQUESTS_PREFIX, ARM_FEEDBACK_PREFIX = "n:", "f:"
"""Prefixes of count fields that the dashboard adds up."""


class ExperimentAssignment(NamedTuple):
    """Arm of an experiment that answers a request, and the key that determined it; None if the caller chose the arm.

    All fields are from the time of routing: the experiment may be stopped before the answers are ready.
    """

    experiment_name: str
    arm_name: str
    assignment_key: bytes | None
    is_sampled: bool = False
    """True if the key's exposures are logged."""


class ExperimentMetrics:
    """Counts of requests by the arms of experiments."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.requests = counter("larder_experiment_requests", "Requests that an arm answered", ["experiment", "arm"])
        self.answers = counter(
            "larder_experiment_answers", "Entities answered by arms, by source", ["experiment", "arm", "source"]
        )
        self.version = Gauge(
            "larder_experiments_version", "The version of the experiments in force here", registry=registry
        )
        self.feedback = counter(
            "larder_experiment_feedback", "Feedback by arm of an experiment", ["experiment", "arm", "event"]
        )
        self.without_arm = counter(
            "larder_experiment_aside", "Requests in no arm while experiments are held", ["reason"]
        )

    def counts_by_field(self) -> dict[str, int]:
        """Return the requests and feedback of arms, by the fields of the dashboard."""
        return {
            prefix + "=".join(value_by_label[label_name] for label_name in label_names): int(count)
            for counter, prefix, label_names in (
                (self.requests, ARM_REQUESTS_PREFIX, ("experiment", "arm")),
                (self.feedback, ARM_FEEDBACK_PREFIX, ("experiment", "arm", "event")),
            )
            for value_by_label, count in counts_of(counter)
        }


class ExperimentRouter:
    """Router of requests by the caller's key alone, so that all replicas choose the same namespace for a request."""

    def __init__(
        self,
        arm_holder: ArmHolder,
        exposure_log: ExposureLog,
        metrics: ExperimentMetrics,
        canary_of: Callable[[LookupService], CanaryRouter],
    ) -> None:
        """`canary_of` returns the canary router of a service's namespace."""
        self.exposures = exposure_log
        self._canary_of = canary_of
        self._arm_holder = arm_holder
        self._metrics = metrics
        self._event_names = EventNames()

    def route_request(
        self, routed: RoutedRequest, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> RoutedRequest:
        """Send a request to the namespace of its arm. Raises Problem (409), like `route`."""
        if options.arm is None and self._arm_holder.routing is None:
            return routed
        service, assignment = self.route(entities, options)
        if assignment is None:
            return routed._replace(service=service)
        finisher = partial(self.finish, assignment)
        return routed._replace(service=service, finishers=(finisher, *routed.finishers))

    def finish(self, assignment: ExperimentAssignment, answers: list[AnswerJson], _is_of_candidates: bool) -> None:
        """Add the arm to the answers of a request, and count them."""
        self.attach_arm(assignment, answers)

    def route(
        self, entities: Sequence[RequestedEntity], options: RequestOptions
    ) -> tuple[LookupService, ExperimentAssignment | None]:
        """Return the service that answers the request, and its assignment; None if it is in no arm.

        Raises Problem (409) if the caller names an arm that is not held here.
        """
        own_service, routing = self._arm_holder.own_service, self._arm_holder.routing
        if options.arm is not None:
            return self._route_to_named_arm(options.arm)
        if routing is None:
            return own_service, None
        if options.generation is not None:
            return self._without_arm(self._service_holding(options.generation), "pinned")
        key = assignment_key(own_service.capture_served(), entities, options)
        if key is None:
            return self._without_arm(own_service, "no_key")
        if (experiment_and_arm := routing.find_arm(key)) is None:
            return self._without_arm(own_service, "not_in_experiment")
        experiment_name, arm_name = experiment_and_arm
        service = self._arm_service(experiment_name, arm_name)
        if service is None or not _can_answer(service, entities):
            return self._without_arm(own_service, "not_held")
        return service, ExperimentAssignment(experiment_name, arm_name, key, routing.is_sampled(experiment_name, key))

    def attach_arm(self, assignment: ExperimentAssignment | None, answers: list[AnswerJson]) -> list[AnswerJson]:
        """Add the arm to each answer and count them; without an arm return the answers unchanged."""
        if assignment is None:
            return answers
        experiment_name, arm_name, key, _ = assignment
        for answer in answers:
            answer["experiment"], answer["arm"] = experiment_name, arm_name
        if key is not None:
            self._log_exposure(assignment, key)
            self._metrics.requests.labels(experiment_name, arm_name).inc()
            for answer in answers:
                self._metrics.answers.labels(experiment_name, arm_name, answer["source"]).inc()
        return answers

    def feedback(self, report: FeedbackReport) -> dict[str, str | None]:
        """Count a caller's report for the arm of an experiment and for that of a canary in its namespace.

        Returns what it was counted for: `arm` is null only if it was counted for nothing.
        """
        service = self._arm_holder.own_service
        experiment_and_arm: tuple[str, str] | None = report.arm
        if report.canary_key is not None and (routing := self._arm_holder.routing) is not None:
            experiment_and_arm = routing.find_arm(report.canary_key)
        elif report.generation is not None:
            service = self._service_holding(report.generation)
        if experiment_and_arm is not None:
            arm_service = self._running_service(*experiment_and_arm)
            service, experiment_and_arm = (service, None) if arm_service is None else (arm_service, experiment_and_arm)
        canary_arm = None
        if report.arm is None:
            canary_arm = self._canary_of(service).count_feedback(
                service.capture_served(), report.generation, report.canary_key, report.event_name, report.event_count
            )
        if experiment_and_arm is None:
            return {"arm": canary_arm}
        counted_event_name = self._event_names.counted_name(report.event_name)
        self.exposures.count_feedback(*experiment_and_arm, counted_event_name, report.event_count)
        self._metrics.feedback.labels(*experiment_and_arm, counted_event_name).inc(report.event_count)
        experiment_arm = "=".join(experiment_and_arm)
        return {"arm": canary_arm or experiment_arm, "experiment": experiment_arm}

    def _log_exposure(self, assignment: ExperimentAssignment, assignment_key: bytes) -> None:
        """Log an exposure, except for erased or blocked keys and keys outside the experiment's sample."""
        blocklist = self._arm_holder.own_service.follower.holder.blocklist
        is_logged = (
            assignment.is_sampled and assignment_key not in blocklist.users and assignment_key not in blocklist.entities
        )
        self.exposures.count_request(
            assignment.experiment_name, assignment.arm_name, assignment_key if is_logged else None
        )

    def _running_service(self, experiment_name: str, arm_name: str) -> LookupService | None:
        """Return the service of an arm of a running experiment."""
        routing = self._arm_holder.routing
        held_experiment = None if routing is None else routing.experiments.get(experiment_name)
        return (
            self._arm_service(experiment_name, arm_name)
            if held_experiment is not None and held_experiment.is_running
            else None
        )

    def _route_to_named_arm(self, requested_arm: RequestedArm) -> tuple[LookupService, ExperimentAssignment]:
        service = self._arm_service(requested_arm.experiment_name, requested_arm.arm_name)
        if service is None:
            routing = self._arm_holder.routing
            held_experiments = {} if routing is None else routing.experiments
            raise Problem(
                409, "arm_gone",
                f"no arm {requested_arm.arm_name!r} of an experiment {requested_arm.experiment_name!r} is held here",
                field="arm",
                held=[
                    f"{held_experiment.name}={arm.name}"
                    for held_experiment in held_experiments.values() for arm in held_experiment.arms
                ],
            )  # fmt: skip
        return service, ExperimentAssignment(requested_arm.experiment_name, requested_arm.arm_name, None)

    def _arm_service(self, experiment_name: str, arm_name: str) -> LookupService | None:
        """Return the service of an arm; None if it is not held."""
        routing = self._arm_holder.routing
        held_experiment = None if routing is None else routing.experiments.get(experiment_name)
        held_arm = None if held_experiment is None else held_experiment.arm(arm_name)
        return None if held_arm is None else self._arm_holder.service(held_arm.namespace)

    def _service_holding(self, generation: str) -> LookupService:
        """Return the service that holds a pinned generation, the replica's own first; its own if none does."""
        own_service = self._arm_holder.own_service
        for service in (own_service, *self._arm_holder.answering_services):
            served = service.follower.served
            if served is not None and served.find(generation) is not None:
                return service
        return own_service

    def _without_arm(self, service: LookupService, no_arm_reason: str) -> tuple[LookupService, None]:
        self._metrics.without_arm.labels(no_arm_reason).inc()
        return service, None


def _can_answer(service: LookupService, entities: Sequence[RequestedEntity]) -> bool:
    """True if the namespace has every requested table: a night of that namespace may have left one out."""
    tables = service.capture_served().live.manifest.tables
    return all(entity.table in tables for entity in entities)
