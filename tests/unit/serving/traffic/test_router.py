"""Requests under way while experiments change: each is answered, marked and counted as it was routed."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from cache.store.blocklist import Blocklist
from cache.traffic.experiments import Experiment, Experiments
from serving.requests.models import RequestedEntity
from serving.requests.options import RequestOptions
from serving.traffic.arms import ArmHolder, Routing
from serving.traffic.canary import CanaryRouters
from serving.traffic.exposures import ExposureLog
from serving.traffic.router import ExperimentMetrics, ExperimentRouter
from tests.unit.serving.traffic.scene import KEYS, OTHER_EXPERIMENT, FakeService, experiment


@dataclass
class FakeArms:
    """Routing that a test sets; every namespace answers."""

    own_service: Any = field(default_factory=FakeService)
    routing: Routing | None = None

    def service(self, _namespace: str) -> Any:
        return self.own_service


@dataclass
class FakeExposures:
    recorded_requests: list[tuple[str, str, bytes | None]] = field(default_factory=list)

    def count_request(self, experiment: str, arm: str, key: bytes | None) -> None:
        self.recorded_requests.append((experiment, arm, key))


@dataclass
class Scene:
    arms: FakeArms = field(default_factory=FakeArms)
    exposures: FakeExposures = field(default_factory=FakeExposures)

    def __post_init__(self) -> None:
        live = SimpleNamespace(manifest=SimpleNamespace(tables={}))
        self.arms.own_service.capture_served = lambda: SimpleNamespace(live=live)
        self.router = ExperimentRouter(
            cast(ArmHolder, self.arms),
            cast(ExposureLog, self.exposures),
            ExperimentMetrics(CollectorRegistry()),
            canary_of=CanaryRouters().of,
        )

    def run(self, *experiments: Experiment) -> None:
        record = Experiments(1, "own", experiments=experiments)
        self.arms.routing = Routing(record) if record.current else None


def asked_with(key: bytes) -> RequestOptions:
    return RequestOptions(deadline_s=1.0, canary_key=key)


@pytest.mark.parametrize(
    "remaining_experiments",
    [(), (OTHER_EXPERIMENT,), (replace(OTHER_EXPERIMENT, started_at=None),)],
    ids=["none", "another", "one ready"],
)
def test_requests_under_way_over_a_stop_are_answered_as_they_were_routed(
    remaining_experiments: tuple[Experiment, ...],
) -> None:
    scene = Scene()
    scene.run(experiment(), OTHER_EXPERIMENT)
    entities: list[RequestedEntity] = []
    routed = [(key, scene.router.route(entities, asked_with(key))[1]) for key in KEYS[:200]]
    under_way = [(key, assignment) for key, assignment in routed if assignment and assignment.experiment_name == "e"]

    scene.run(*remaining_experiments)
    answers = [scene.router.attach_arm(assignment, [{"source": "l1"}, {"source": "l2"}]) for _, assignment in under_way]

    assert under_way
    marked_arms = [[(answer["experiment"], answer["arm"]) for answer in request_answers] for request_answers in answers]
    assert marked_arms == [[("e", assignment.arm_name)] * 2 for _, assignment in under_way]
    assert scene.exposures.recorded_requests == [("e", assignment.arm_name, key) for key, assignment in under_way]


def test_a_key_that_was_erased_while_its_request_was_under_way_is_not_written_down() -> None:
    scene = Scene()
    scene.run(experiment())
    key = next(key for key in KEYS if scene.router.route([], asked_with(key))[1])
    _, assigned = scene.router.route([], asked_with(key))
    assert assigned is not None

    scene.arms.own_service.follower.holder.blocklist = Blocklist(1, users=frozenset({key}))
    scene.router.attach_arm(assigned, [{"source": "l1"}])

    assert scene.exposures.recorded_requests == [("e", assigned.arm_name, None)]
