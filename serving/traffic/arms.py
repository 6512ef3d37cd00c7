"""Namespaces of the arms of experiments, held in addition to the replica's own while an experiment names them."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from typing import Any, Protocol

from cache.errors import LarderError, traceback_of
from cache.store.artefacts import ArtefactStore
from cache.traffic.experiments import EXPERIMENTS_VERSIONS, Experiment, Experiments
from cache.traffic.split import BUCKET_COUNT, BucketOwners, KeySplit, bucket_count
from serving.engine.service import LookupService
from serving.process.resources import StoreThreads
from serving.requests.reasons import StaleReason

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
"""Seconds until the next attempt to start a namespace after a failure; doubles per attempt."""
RETRY_MAX_S = 60.0
_CANCEL_INTERVAL_S = 0.1


class ArmNamespace(Protocol):
    """Interface of a namespace that can be held: its own follower, heartbeat and readers."""

    @property
    def service(self) -> LookupService:
        """Lookup service of the namespace."""
        ...

    async def start(self) -> None:
        """Load the live generation, send heartbeats, and follow the pointer; returns even if none can be loaded yet."""

    async def aclose(self) -> None:
        """Sign off and release everything, also after an interrupted start."""

    async def drain(self) -> None:
        """Sign off, while answers go on; a start under way does not sign on."""


class ArmState(Enum):
    """State of an arm's namespace."""

    STARTING = "starting"
    """The namespace is opened and loads its live generation; it does not answer yet."""
    SERVING = "held"
    """An experiment names the namespace, and it answers."""
    DRAINING = "draining"
    """No experiment names the namespace any more; requests that captured it go on."""
    CLOSING = "closing"
    """The namespace is being closed; it is not opened again before it is closed."""
    FAILED = "failed"
    """The namespace could not be started, and is closed; it is tried again later."""
    CLOSED = "closed"
    """The namespace is released."""


_NEXT_STATES: Mapping[ArmState, frozenset[ArmState]] = {
    ArmState.STARTING: frozenset({ArmState.SERVING, ArmState.FAILED, ArmState.CLOSING}),
    ArmState.SERVING: frozenset({ArmState.DRAINING, ArmState.CLOSING}),
    ArmState.DRAINING: frozenset({ArmState.SERVING, ArmState.CLOSING}),
    ArmState.CLOSING: frozenset({ArmState.CLOSED}),
    ArmState.FAILED: frozenset({ArmState.STARTING, ArmState.CLOSED}),
    ArmState.CLOSED: frozenset(),
}


class Arm:
    """Namespace of an arm, from its opening to its end. Only `ArmHolder` changes its state."""

    def __init__(self, namespace_name: str) -> None:
        self.name = namespace_name
        self.state = ArmState.STARTING
        self.namespace: ArmNamespace | None = None
        """Opened namespace; None before it is opened, and once it is closed."""
        self.failure_count = 0
        self.retry_at = 0.0
        self.draining_since = 0.0
        self.task: asyncio.Task[None] | None = None
        """Task that starts or closes the namespace."""

    def enter(self, state: ArmState) -> None:
        """Change the state; raise RuntimeError for an invalid transition."""
        if state not in _NEXT_STATES[self.state]:
            raise RuntimeError(f"arm {self.name} cannot become {state.value}: it is {self.state.value}")
        self.state = state

    @property
    def answering_service(self) -> LookupService | None:
        """Lookup service; None unless the namespace is held, has a generation, and enforces its blocklists."""
        if self.namespace is None or self.state not in (ArmState.SERVING, ArmState.DRAINING):
            return None
        service = self.namespace.service
        holder = service.follower.holder
        obeys = holder.is_blocklist_known and holder.enforcement_error is None
        return service if obeys and holder.served is not None else None


class Routing:
    """Routing table of one version of the experiments."""

    def __init__(self, record: Experiments) -> None:
        self.experiments: Mapping[str, Experiment] = {experiment.name: experiment for experiment in record.current}
        self._experiment_owners = record.owners
        self._arm_owners_by_experiment: Mapping[str, BucketOwners] = {
            experiment.name: experiment.owners for experiment in record.running
        }
        self._sample_by_experiment = {
            experiment.name: KeySplit.of(f"{experiment.salt}/exposures", 100 * experiment.sample)
            for experiment in record.running
        }

    def find_arm(self, assignment_key: bytes) -> tuple[str, str] | None:
        """Return the running experiment and the arm of the key; None without one."""
        experiment_name = self._experiment_owners.owner_of(assignment_key)
        arm_owners = None if experiment_name is None else self._arm_owners_by_experiment.get(experiment_name)
        arm_name = None if arm_owners is None else arm_owners.owner_of(assignment_key)
        return None if experiment_name is None or arm_name is None else (experiment_name, arm_name)

    def is_sampled(self, experiment_name: str, assignment_key: bytes) -> bool:
        """True if the key's exposures are recorded; always the same for a key."""
        return self._sample_by_experiment[experiment_name].has_key(assignment_key)


class ArmHolder:
    """Follower of the experiments' record; holds the namespaces of their arms.

    Polls run one after the other and do not wait for namespaces: each is started and closed by its own task. A
    namespace that is no longer named is released after `grace_s`, when requests that captured it have ended.
    """

    def __init__(
        self,
        own_service: LookupService,
        namespace_name: str,
        store: ArtefactStore,
        open_namespace: Callable[[str], ArmNamespace],
        *,
        in_thread: StoreThreads,
        grace_s: float,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own_service, self.namespace = own_service, namespace_name
        self.record = Experiments()
        self.routing: Routing | None = None
        """Routing of keys; None while no experiment is held ready or runs."""
        self._store = store
        self._open_namespace = open_namespace
        self._in_thread = in_thread
        self._grace_s, self._monotonic_clock = grace_s, monotonic_clock
        self._arm_by_namespace: dict[str, Arm] = {}
        """Arms by namespace; a namespace stays until it is closed, so that it is not opened twice."""
        self._refresh_lock = asyncio.Lock()
        self._is_ending = False

    def service(self, namespace_name: str) -> LookupService | None:
        """Return the service of a namespace; None if it does not answer here."""
        if namespace_name == self.namespace:
            return self.own_service
        arm = self._arm_by_namespace.get(namespace_name)
        return None if arm is None else arm.answering_service

    @property
    def answering_services(self) -> tuple[LookupService, ...]:
        """Services of all answering arms, without that of the replica's own namespace."""
        arm_services = [arm.answering_service for arm in self._arm_by_namespace.values()]
        return tuple(service for service in arm_services if service is not None)

    @property
    def state_by_namespace(self) -> dict[str, ArmState]:
        """States of the namespaces held or to be held, without the replica's own."""
        return {name: arm.state for name, arm in self._arm_by_namespace.items()}

    async def refresh(self) -> None:
        """Read the newest version; if that fails, keep the last one in force and set a concern."""
        async with self._refresh_lock:
            follower = self.own_service.follower
            try:
                newer_record = await self._in_thread(_read_newer_experiments, self._store, self.record.version)
            except (LarderError, OSError, ValueError) as error:
                follower.note_concern("experiments", StaleReason.EXPERIMENTS_UNREADABLE, str(error))
            else:
                follower.note_concern("experiments", None)
                self.record = newer_record or self.record
            self.routing = Routing(self.record) if self.record.current else None
            follower.holder.set_experiments_running(are_running=bool(self.record.running))
            if not self._is_ending:
                self._advance_arms()

    async def enforce(self) -> None:
        """Make every arm enforce the blocklist of the replica's own namespace; costs nothing if all do.

        An arm that fails does not delay others, and does not answer until a later call succeeds.
        """
        await asyncio.gather(*(self._enforce(arm) for arm in list(self._arm_by_namespace.values())))

    async def settled(self) -> None:
        """Wait until no namespace is being started or closed."""
        while tasks := {arm.task for arm in self._arm_by_namespace.values() if arm.task is not None}:
            await asyncio.wait(tasks)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the experiments for the dashboard, each with its arms, control first."""
        experiment_rows = []
        for experiment in self.record.current:
            arms = sorted(experiment.arms, key=lambda arm: arm.namespace != self.namespace)
            experiment_rows.append({
                "experiment": experiment.name,
                "share": bucket_count(experiment.buckets) / BUCKET_COUNT,
                "started_at": experiment.started_at,
                "arms": [
                    {
                        "arm": arm.name,
                        "namespace": arm.namespace,
                        "share": bucket_count(arm.buckets) / BUCKET_COUNT,
                        "generation": self._live_generation(arm.namespace),
                    }
                    for arm in arms
                ],
            })  # fmt: skip
        return experiment_rows

    def _live_generation(self, namespace_name: str) -> str | None:
        service = self.service(namespace_name)
        served = None if service is None else service.follower.served
        return None if served is None else served.live.generation

    async def drain(self) -> None:
        """Sign off in all namespaces, and open no further ones."""
        self._is_ending = True
        open_namespaces = [arm.namespace for arm in self._arm_by_namespace.values() if arm.namespace is not None]
        await asyncio.gather(*(namespace.drain() for namespace in open_namespaces), return_exceptions=True)

    async def aclose(self) -> None:
        """Release all namespaces for the last time."""
        self._is_ending = True
        for arm in list(self._arm_by_namespace.values()):
            self._begin_close(arm)
        await self.settled()

    def _advance_arms(self) -> None:
        """Advance each arm's state by record and clock, without waiting."""
        now_s, named_namespaces = self._monotonic_clock(), self.record.namespaces(self.namespace)
        for arm_namespace in named_namespaces:
            arm = self._arm_by_namespace.get(arm_namespace)
            if arm is None:
                self._begin_start(Arm(arm_namespace))
            elif arm.state is ArmState.DRAINING:
                arm.enter(ArmState.SERVING)
            elif arm.state is ArmState.FAILED and now_s >= arm.retry_at:
                arm.enter(ArmState.STARTING)
                self._begin_start(arm)
        for arm in [arm for arm in self._arm_by_namespace.values() if arm.name not in named_namespaces]:
            if arm.state is ArmState.SERVING:
                arm.enter(ArmState.DRAINING)
                arm.draining_since = now_s
            if arm.state is not ArmState.DRAINING or now_s - arm.draining_since >= self._grace_s:
                self._begin_close(arm)

    def _begin_start(self, arm: Arm) -> None:
        self._arm_by_namespace[arm.name] = arm
        self._run_task(arm, self._start(arm))

    def _begin_close(self, arm: Arm) -> None:
        if arm.state is ArmState.FAILED:
            arm.enter(ArmState.CLOSED)
            del self._arm_by_namespace[arm.name]
        elif arm.state is not ArmState.CLOSING:
            start_task = arm.task
            arm.enter(ArmState.CLOSING)
            if start_task is not None:
                start_task.cancel()
            self._run_task(arm, self._close(arm, start_task))

    def _run_task(self, arm: Arm, arm_work: Coroutine[Any, Any, None]) -> None:
        arm.task = task = asyncio.create_task(arm_work)

        def clear_task(_task: asyncio.Task[None]) -> None:
            if arm.task is task:
                arm.task = None

        task.add_done_callback(clear_task)

    async def _start(self, arm: Arm) -> None:
        try:
            arm.namespace = namespace = self._open_namespace(arm.name)
            if self._is_ending:
                await namespace.drain()
            await self._enforce(arm)
            await namespace.start()
            # Again: loading takes minutes, in which the blocklist may have changed.
            await self._enforce(arm)
        except Exception as error:
            arm.failure_count += 1
            wait_s = min(RETRY_MAX_S, FIRST_RETRY_S * 2 ** min(arm.failure_count - 1, 10))
            log.error(
                "namespace %s cannot be held; trying again in %g s: %s",
                arm.name, wait_s, error, exc_info=traceback_of(error),
            )  # fmt: skip
            await self._close_namespace(arm)
            if arm.state is ArmState.STARTING:
                arm.retry_at = self._monotonic_clock() + wait_s
                arm.enter(ArmState.FAILED)
        else:
            if arm.state is ArmState.STARTING:  # a cancellation may have been lost
                arm.failure_count = 0
                arm.enter(ArmState.SERVING)
                log.info("namespace %s is held for experiments", arm.name)

    async def _close(self, arm: Arm, start_task: asyncio.Task[None] | None) -> None:
        while start_task is not None and not start_task.done():
            # Repeatedly: a client library may lose a cancellation that coincides with a reply.
            start_task.cancel()
            await asyncio.wait({start_task}, timeout=_CANCEL_INTERVAL_S)
        await self._close_namespace(arm)
        arm.enter(ArmState.CLOSED)
        del self._arm_by_namespace[arm.name]
        log.info("namespace %s is no longer held", arm.name)

    async def _close_namespace(self, arm: Arm) -> None:
        if arm.namespace is not None:
            try:
                await arm.namespace.aclose()
            except Exception:  # the other namespaces must not be affected
                log.exception("namespace %s could not be closed cleanly", arm.name)
        arm.namespace = None

    async def _enforce(self, arm: Arm) -> None:
        """Make an arm enforce the blocklist of the replica's own namespace, even if it changes meanwhile."""
        own_holder, is_enforced = self.own_service.follower.holder, True
        while is_enforced and arm.namespace is not None:
            arm_holder = arm.namespace.service.follower.holder
            is_enforced = await arm_holder.set_other_blocklist(own_holder.blocklist)
            if arm_holder.other_blocklist is own_holder.blocklist:
                return


def _read_newer_experiments(store: ArtefactStore, current_version: int) -> Experiments | None:
    return (
        EXPERIMENTS_VERSIONS.latest(store) if EXPERIMENTS_VERSIONS.read_newest_number(store) > current_version else None
    )
