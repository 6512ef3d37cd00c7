"""Arms over a store on disk, with fake namespaces that record the calls."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cache.errors import ConfigError
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.traffic.experiments import Experiment, ExperimentArm, change_experiments
from cache.traffic.split import allot_buckets
from serving.engine.service import LookupService
from serving.metrics.registry import Metrics
from serving.traffic.arms import ArmHolder
from tests.fakes import THREADS, FakeClock

KEYS = [f"key-{number}".encode() for number in range(20_000)]
GRACE_S = 10.0
LASTS_S = 5.0
"""Seconds that a start or an end lasts at most, so that whoever waits for it fails, and does not hang."""


def experiment(name: str = "e", other_namespace: str = "second", sample: float = 1.0) -> Experiment:
    halves = allot_buckets({}, {"a": 0.5, "b": 0.5})
    arms = (ExperimentArm("a", "own", 0.5, halves["a"]), ExperimentArm("b", other_namespace, 0.5, halves["b"]))
    return Experiment(name, f"own/{name}", 0.5, ((0, 5_000),), arms, 1.0, 2.0, None, sample)


@dataclass
class FakeShelf:
    served: Any = "loaded"
    divided: bool = False
    blocklist: Blocklist = field(default_factory=Blocklist)
    other_blocklist: Blocklist | None = None
    is_blocklist_known: bool = True
    enforcement_error: str | None = None
    has_threads: bool = True
    """False while nothing can be put in force."""

    async def set_other_blocklist(self, other_blocklist: Blocklist) -> bool:
        self.other_blocklist = other_blocklist
        await asyncio.sleep(0)
        self.enforcement_error = None if self.has_threads else "can't start new thread"
        return self.has_threads

    def set_experiments_running(self, *, are_running: bool) -> None:
        self.divided = are_running


@dataclass
class FakeFollower:
    holder: FakeShelf = field(default_factory=FakeShelf)
    concerns: dict[str, str] = field(default_factory=dict)

    @property
    def served(self) -> Any:
        return self.holder.served

    def note_concern(self, about: str, reason: str | None, _remedy: str = "") -> None:
        if reason is None:
            self.concerns.pop(about, None)
        else:
            self.concerns[about] = reason


@dataclass
class FakeService:
    follower: FakeFollower = field(default_factory=FakeFollower)
    metrics: Metrics = field(default_factory=Metrics)


@dataclass
class FakeNamespace:
    """A namespace that records calls; its start and its end wait while their gates are closed."""

    log: list[str]
    name: str
    starts: asyncio.Event
    ends: asyncio.Event
    fails: bool = False
    service: Any = field(default_factory=FakeService)

    async def start(self) -> None:
        self.log.append(f"start {self.name}")
        async with asyncio.timeout(LASTS_S):
            await self.starts.wait()
        if self.fails:
            raise OSError("no")

    async def aclose(self) -> None:
        self.log.append(f"close {self.name}")
        async with asyncio.timeout(LASTS_S):
            await self.ends.wait()

    async def drain(self) -> None:
        self.log.append(f"drain {self.name}")


@dataclass
class Scene:
    """Arms over a store on disk, with fake namespaces."""

    folder: Path
    log: list[str] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)
    own_service: FakeService = field(default_factory=FakeService)
    failing: set[str] = field(default_factory=set)
    unconfigured: set[str] = field(default_factory=set)
    opened: dict[str, FakeNamespace] = field(default_factory=dict)
    """The last of each name."""

    def __post_init__(self) -> None:
        self.store = ArtefactStore(str(self.folder))
        self.starts, self.ends = asyncio.Event(), asyncio.Event()
        self.starts.set()
        self.ends.set()
        self.arms = ArmHolder(
            cast(LookupService, self.own_service), "own", self.store, self.open,
            in_thread=THREADS, grace_s=GRACE_S, monotonic_clock=self.clock,
        )  # fmt: skip

    def open(self, name: str) -> FakeNamespace:
        if name in self.unconfigured:
            raise ConfigError(f"{name} cannot be opened")
        namespace = FakeNamespace(self.log, name, self.starts, self.ends, name in self.failing)
        self.opened[name] = namespace
        return namespace

    def write(self, *experiments: Experiment) -> None:
        change_experiments(self.store, lambda record: replace(record, salt="own", experiments=experiments))

    async def refresh_and_settle(self) -> None:
        """Refresh, and wait until what that starts is done."""
        await self.arms.refresh()
        await self.arms.settled()

    async def wait_for_start(self) -> None:
        """Wait until a start is under way."""
        for _ in range(9):
            await asyncio.sleep(0)
        assert self.log

    def states(self) -> dict[str, str]:
        """Return the state of each namespace other than the own one."""
        return {name: state.value for name, state in self.arms.state_by_namespace.items()}

    def block(self, version: int, item: bytes) -> Blocklist:
        """Put a version in force in the own namespace, without any notification."""
        self.own_service.follower.holder.blocklist = blocklist = Blocklist(version, frozenset({item}))
        return blocklist

    def get_other_blocklist(self, name: str) -> Blocklist | None:
        """Return the last blocklist that a namespace was told to obey."""
        blocklist: Blocklist | None = self.opened[name].service.follower.holder.other_blocklist
        return blocklist


OTHER_EXPERIMENT = replace(experiment("f", "third"), buckets=((5_000, 6_000),))
"""A second experiment beside that of `experiment()`."""
