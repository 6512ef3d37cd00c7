"""A replica: the whole service, including its HTTP server, on a host of its own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cache.store.artefacts import ArtefactStore
from serving.app import create_app, make_server
from serving.config.settings import ServingConfig
from serving.engine.service import LookupService
from serving.http.routes import Service
from serving.process.server import Server
from serving.traffic.arms import ArmHolder
from serving.traffic.router import ExperimentRouter
from tests.attached import attached
from tests.simulation import nights
from tests.simulation.virtual_loop import Host, VirtualLoop, context_of

REDIS_PORT = 6_379


@dataclass
class Listener:
    """The socket that a server listens on, here only a number."""

    port: int

    def dup(self) -> "Listener":
        """Return the same listener."""
        return self

    def fileno(self) -> int:
        """Return an arbitrary number."""
        return 1

    def close(self) -> None:
        """Do nothing."""


class Replica:
    """A service that is started, stopped and killed; each start is a process of its own."""

    def __init__(self, number: int, loop: VirtualLoop, settings: Callable[[], ServingConfig]) -> None:
        self.number = number
        self.port = 8_000 + number
        self.host = Host(f"host-{number}")
        self.server: Server | None = None
        self.service: Service | None = None
        self.is_down = True
        """True before it is started, and once it has stopped or was killed."""
        self.is_stopping = False
        self.started_at = 0.0
        self._loop = loop
        self._settings = settings

    def start(self) -> asyncio.Task[None]:
        """Starts a new process on this host."""
        assert self.is_down
        self.is_down = self.is_stopping = False
        self.started_at = self._loop.time()
        clock_ahead_s = self.host.clock_ahead_s
        self.host = Host(self.host.name)
        self.host.clock_ahead_s = clock_ahead_s
        return self._run(self._start())

    def stop(self) -> asyncio.Task[None]:
        """Stop the service as a signal would."""
        return self._run(self._stop())

    def kill(self) -> None:
        """End the service at once."""
        self._loop.kill(self.host)
        self.is_down = True
        self.server = self.service = None

    @property
    def is_up(self) -> bool:
        """Whether the service answers."""
        return self.service is not None

    @property
    def arms(self) -> ArmHolder | None:
        """Arms of experiments that the service holds; None while it is not up."""
        return None if self.service is None else attached(self.service, ExperimentRouter)._arm_holder

    @property
    def services(self) -> dict[str, LookupService]:
        """The served namespaces, by name."""
        if self.service is None or (arms := self.arms) is None:
            return {}
        names = dict.fromkeys((nights.OWN_NAMESPACE, *arms.state_by_namespace))
        service_by_namespace = {name: arms.service(name) for name in names}
        return {name: service for name, service in service_by_namespace.items() if service is not None}

    def _run(self, work: Any) -> asyncio.Task[None]:
        return self._loop.create_task(work, context=context_of(self.host))

    async def _start(self) -> None:
        config = self._settings()
        app = create_app(config)
        server = make_server(app, config, "critical", lambda: None)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([Listener(self.port)])  # type: ignore[list-item]
        self.server, self.service = server, app.state.service
        self.host.up_since = self._loop.time()

    async def _stop(self) -> None:
        server, self.server, self.service = self.server, None, None
        self.is_stopping = True
        if server is not None:
            await server.shutdown()
            self.is_down = True


def store_of(store_for: Callable[[str], ArtefactStore]) -> type[ServingConfig]:
    """Return settings whose artefact store is that of their namespace."""

    class OfStore(ServingConfig):
        def store(self) -> ArtefactStore:
            return store_for(self.namespace)

    return OfStore


def settings(store_for: Callable[[str], ArtefactStore], **changes: Any) -> ServingConfig:
    """Return a service's settings, with costly background work less often than in production."""
    return store_of(store_for)(
        **{
            "redis_url": f"redis://redis:{REDIS_PORT}/0", "port": 0, "dashboard_s": 0.0, "quality_s": 0.0,
            "quality_per_mille": 0.0, "overlay_reads": "always", "queue_interval_ms": 10_000.0,
            "heartbeat_s": 2.5, "poll_s": 4.0, "blocklist_poll_s": 4.0, "figures_s": 60.0,
            "advisor_keys": 0, "live_nice": 0, "l1_bytes": 1 << 16, "sketch_s": 10.0,
            **changes,
        }
    )  # fmt: skip
