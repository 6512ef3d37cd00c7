"""Arms as a replica holds them: opened, kept in force, let go in time; and which keys are written down."""

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from cache.control.allotment import allotted
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.experiments import Experiment, ExperimentArm, Experiments, change_experiments
from serving.experiments.arms import Arms, Routing
from serving.lookup.service import LookupService
from serving.metrics.registry import Metrics
from tests.fakes import FakeClock

KEYS = [f"key-{number}".encode() for number in range(20_000)]
GRACE_S = 10.0


def experiment(name: str = "e", other: str = "second", sample: float = 1.0) -> Experiment:
    halves = allotted({}, {"a": 0.5, "b": 0.5})
    arms = (
        ExperimentArm("a", "own", 0.5, halves["a"]),
        ExperimentArm("b", other, 0.5, halves["b"]),
    )
    return Experiment(name, f"own/{name}", 0.5, ((0, 5_000),), arms, 1.0, 2.0, None, sample)


@dataclass
class FakeShelf:
    divided: bool = False
    blocklist: Blocklist = field(default_factory=Blocklist)
    beside: Blocklist | None = None

    async def block_beside(self, other: Blocklist) -> None:
        self.beside = other

    def divide(self, *, by_experiments: bool) -> None:
        self.divided = by_experiments


@dataclass
class FakeFollower:
    shelf: FakeShelf = field(default_factory=FakeShelf)
    holding: Any = "loaded"
    concerns: dict[str, str] = field(default_factory=dict)

    def note(self, about: str, why: str | None, _remedy: str = "") -> None:
        if why is None:
            self.concerns.pop(about, None)
        else:
            self.concerns[about] = why


@dataclass
class FakeService:
    follower: FakeFollower = field(default_factory=FakeFollower)
    metrics: Metrics = field(default_factory=Metrics)


@dataclass
class FakeNamespace:
    log: list[str]
    name: str
    fails: bool = False
    service: Any = field(default_factory=FakeService)

    async def start(self) -> None:
        self.log.append(f"start {self.name}")
        if self.fails:
            raise OSError("no")

    async def aclose(self) -> None:
        self.log.append(f"close {self.name}")

    async def drain(self) -> None:
        self.log.append(f"drain {self.name}")


@dataclass
class Scene:
    """Arms over a store on disk, with namespaces that only note what is done with them."""

    folder: Path
    log: list[str] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)
    own: FakeService = field(default_factory=FakeService)
    failing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store = ArtefactStore(str(self.folder))
        self.arms = Arms(
            cast(LookupService, self.own), "own", self.store,
            lambda name: FakeNamespace(self.log, name, name in self.failing),
            in_thread=asyncio.to_thread, grace_s=GRACE_S, timer=self.clock,
        )  # fmt: skip

    def write(self, *experiments: Experiment) -> None:
        change_experiments(
            self.store, lambda found: replace(found, salt="own", experiments=experiments)
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_namespace_is_held_while_an_experiment_names_it_and_a_while_longer(
    scene: Scene,
) -> None:
    await scene.arms.look()
    assert scene.arms.routing is None and not scene.own.follower.shelf.divided

    held_ready = replace(experiment(), started_at=None)
    scene.write(held_ready)
    await scene.arms.look()
    assert scene.log == ["start second"] and not scene.own.follower.shelf.divided
    assert scene.arms.service("second") is not None and scene.arms.service("third") is None
    assert {scene.arms.routing and scene.arms.routing.of(key) for key in KEYS[:50]} == {None}

    scene.write(experiment())
    await scene.arms.look()
    assert scene.own.follower.shelf.divided
    assert scene.arms.routing is not None
    assert {scene.arms.routing.of(key) for key in KEYS[:50]} == {None, ("e", "a"), ("e", "b")}

    scene.write(replace(experiment(), stopped_at=3.0))
    await scene.arms.look()
    assert scene.arms.routing is None and not scene.own.follower.shelf.divided
    scene.clock.tick(GRACE_S - 1)
    await scene.arms.look()
    assert scene.log == ["start second"]
    scene.clock.tick(1)
    await scene.arms.look()
    assert scene.log == ["start second", "close second"]


async def test_one_that_is_named_again_in_time_is_not_let_go(scene: Scene) -> None:
    scene.write(experiment())
    await scene.arms.look()
    scene.write(replace(experiment(), stopped_at=3.0))
    await scene.arms.look()
    scene.clock.tick(GRACE_S - 1)

    scene.write(replace(experiment(), stopped_at=3.0), experiment("f"))
    await scene.arms.look()
    scene.clock.tick(GRACE_S)
    await scene.arms.look()
    await scene.arms.drain()
    await scene.arms.aclose()

    assert scene.log == ["start second", "drain second", "close second"]


async def test_no_arm_serves_what_the_own_namespace_blocks(scene: Scene) -> None:
    scene.own.follower.shelf.blocklist = before = Blocklist(1, frozenset({b"i1"}))
    scene.write(experiment())
    await scene.arms.look()
    service = scene.arms.service("second")
    assert service is not None
    shelf = cast(FakeShelf, service.follower.shelf)
    assert shelf.beside is before

    await scene.arms.block(after := Blocklist(2, frozenset({b"i2"})))
    assert shelf.beside is after


async def test_a_version_that_cannot_be_read_leaves_the_last_in_force_marked(scene: Scene) -> None:
    scene.write(experiment())
    await scene.arms.look()
    path = scene.folder / "experiments" / "000000000002.json"
    path.write_text("{")

    await scene.arms.look()

    assert scene.own.follower.concerns == {"experiments": "experiments_unreadable"}
    assert scene.own.follower.shelf.divided and scene.arms.record.version == 1
    path.unlink()
    scene.write(experiment(), replace(experiment("f", "third"), buckets=((5_000, 6_000),)))
    await scene.arms.look()
    assert not scene.own.follower.concerns


async def test_a_namespace_that_cannot_be_opened_is_tried_again_and_answers_nothing(
    scene: Scene,
) -> None:
    scene.failing.add("second")
    scene.write(experiment())
    await scene.arms.look()
    assert scene.own.follower.shelf.divided
    assert scene.arms.service("second") is None
    assert scene.log == ["start second", "close second"]

    scene.failing.clear()
    await scene.arms.look()
    assert scene.arms.service("second") is not None


@pytest.mark.parametrize("sample", [1.0, 0.25])
def test_a_key_is_written_down_always_or_never(sample: float) -> None:
    routing = Routing(Experiments(1, "own", experiments=(experiment(sample=sample),)))

    taken = [key for key in KEYS if routing.is_sampled("e", key)]

    count = len(KEYS)
    assert abs(len(taken) - sample * count) <= 5 * math.sqrt(count * sample * (1 - sample))
    # Apart from the arms: of each its share.
    arms = [routing.of(key) for key in taken]
    share = arms.count(("e", "b")) / len(arms)
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(arms))
