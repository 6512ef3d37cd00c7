"""Namespaces of the arms of all experiments, held beside the replica's own for as long as an experiment names them."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cache.control.allotment import BUCKETS, size_of
from cache.control.key_split import Owners, Split
from cache.errors import LarderError
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.experiments import VERSIONS, Experiment, Experiments
from serving.answers.reasons import Stale
from serving.generations.store_threads import InThread
from serving.lookup.service import LookupService

log = logging.getLogger(__name__)


class ArmNamespace(Protocol):
    """Protocol of a namespace that can be held: its own follower, heartbeat and readers."""

    @property
    def service(self) -> LookupService:
        """The service that answers from it."""
        ...

    async def start(self) -> None:
        """Loads what is live there, beats, and goes on following; returns also where nothing can be loaded yet."""

    async def aclose(self) -> None:
        """Signs off and lets go of everything."""

    async def drain(self) -> None:
        """Signs off, while answers go on."""


class Routing:
    """Experiments of one version, ready to look keys up in."""

    def __init__(self, record: Experiments) -> None:
        self.experiments: Mapping[str, Experiment] = {each.name: each for each in record.current}
        self._layer = record.owners
        self._arms: Mapping[str, Owners] = {each.name: each.owners for each in record.running}
        self._sampled = {
            each.name: Split.of(f"{each.salt}/exposures", 100 * each.sample)
            for each in record.running
        }

    def of(self, key: bytes) -> tuple[str, str] | None:
        """Experiment and arm that have the key; None if no experiment that runs does."""
        name = self._layer.of(key)
        owners = None if name is None else self._arms.get(name)
        arm = None if owners is None else owners.of(key)
        return None if name is None or arm is None else (name, arm)

    def is_sampled(self, experiment: str, key: bytes) -> bool:
        """True if the key's exposures are written down: of a key always, or never."""
        return self._sampled[experiment].takes(key)


class Arms:
    """Follows the record of the experiments, and holds the namespaces that it names.

    A namespace that is named no more is let go `grace_s` later: requests that captured it have ended by then.
    """

    def __init__(
        self,
        own: LookupService,
        namespace: str,
        store: ArtefactStore,
        open_namespace: Callable[[str], ArmNamespace],
        *,
        in_thread: InThread,
        grace_s: float,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own, self.namespace = own, namespace
        self.record = Experiments()
        self.routing: Routing | None = None
        """None while no experiment is held ready or runs."""
        self._store = store
        self._open = open_namespace
        self._in_thread = in_thread
        self._grace_s, self._timer = grace_s, timer
        self._held: dict[str, ArmNamespace] = {}
        self._leaving: dict[str, float] = {}

    def service(self, namespace: str) -> LookupService | None:
        """The service of a namespace; None if it is not held, or nothing of it is loaded."""
        if namespace == self.namespace:
            return self.own
        held = self._held.get(namespace)
        return None if held is None or held.service.follower.holding is None else held.service

    @property
    def services(self) -> tuple[LookupService, ...]:
        """All that is held beside the own namespace."""
        return tuple(each.service for each in self._held.values())

    async def look(self) -> None:
        """Takes over the newest version; one that cannot be read leaves the last in force, marked."""
        follower = self.own.follower
        try:
            found = await self._in_thread(_newer, self._store, self.record.version)
        except (LarderError, OSError, ValueError) as error:
            follower.note("experiments", Stale.EXPERIMENTS_UNREADABLE, str(error))
        else:
            follower.note("experiments", None)
            self.record = found or self.record
        await self._hold(self.record.namespaces(self.namespace))
        self.routing = Routing(self.record) if self.record.current else None
        self.own.metrics.experiments_version.set(self.record.version)
        follower.shelf.divide(by_experiments=bool(self.record.running))

    def told(self) -> list[dict[str, Any]]:
        """Experiments for the dashboard, each with its arms, the control first."""
        found = []
        for each in self.record.current:
            arms = sorted(each.arms, key=lambda arm: arm.namespace != self.namespace)
            found.append({
                "experiment": each.name,
                "share": size_of(each.buckets) / BUCKETS,
                "started_at": each.started_at,
                "arms": [
                    {
                        "arm": arm.name,
                        "namespace": arm.namespace,
                        "share": size_of(arm.buckets) / BUCKETS,
                        "generation": self._live(arm.namespace),
                    }
                    for arm in arms
                ],
            })  # fmt: skip
        return found

    def _live(self, namespace: str) -> str | None:
        service = self.service(namespace)
        held = None if service is None else service.follower.holding
        return None if held is None else held.live.generation

    async def block(self, blocklist: Blocklist) -> None:
        """Has no arm serve what the own namespace blocks."""
        for each in list(self._held.values()):
            await each.service.follower.shelf.block_beside(blocklist)

    async def drain(self) -> None:
        """Signs off in all namespaces."""
        for each in self._held.values():
            await each.drain()

    async def aclose(self) -> None:
        """Lets go of all namespaces."""
        while self._held:
            _, held = self._held.popitem()
            await held.aclose()

    async def _hold(self, wanted: tuple[str, ...]) -> None:
        for name in wanted:
            self._leaving.pop(name, None)
            if name not in self._held:
                await self._begin(name)
        for name in [each for each in self._held if each not in wanted]:
            since = self._leaving.setdefault(name, self._timer())
            if self._timer() - since >= self._grace_s:
                del self._leaving[name]
                await self._held.pop(name).aclose()
                log.info("namespace %s is held no more", name)

    async def _begin(self, name: str) -> None:
        opened = self._open(name)
        try:
            await opened.service.follower.shelf.block_beside(self.own.follower.shelf.blocklist)
            await opened.start()
        except Exception:  # the other namespaces are held all the same; the next look tries again
            log.exception("namespace %s cannot be held", name)
            await opened.aclose()
            return
        except BaseException:
            await opened.aclose()
            raise
        self._held[name] = opened
        log.info("namespace %s is held for experiments", name)


def _newer(store: ArtefactStore, current: int) -> Experiments | None:
    return VERSIONS.latest(store) if VERSIONS.newest(store) > current else None
