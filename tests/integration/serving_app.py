"""The real application over a real night, in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from precompute.config.settings import NightConfig
from serving.app import create_app
from serving.config.settings import ServingConfig
from serving.config.tls import TlsWatch
from serving.http.routes import Service

BASE = "http://larder"
PATIENT: dict[str, Any] = {"deadline_ms": 5_000.0, "l2_deadline_ms": 1_000.0, "queue_interval_ms": 60_000.0}
"""Settings where tests share few cores: a loop that comes late counts as overload only in the tests of overload."""


@dataclass(frozen=True, slots=True)
class Running:
    """A started application and a client of it."""

    http: httpx.AsyncClient
    service: Service
    tls: TlsWatch | None = None

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the JSON of a GET, which must succeed."""
        response = await self.http.get(path, params=query)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON of a POST, which must succeed."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        response_body: dict[str, Any] = response.json()
        return response_body

    async def scrape_samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a metric's samples by label values in the order of label names, as Prometheus scrapes them."""
        text = (await self.http.get("/metrics")).text
        return {
            tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }


def settings(night: NightConfig, **changes: Any) -> ServingConfig:
    """Return settings to serve this night, with short times for tests."""
    values: dict[str, Any] = {
        "artifacts": str(night.path(night.artifacts)),
        "state": night.path(night.state),
        "redis_url": night.redis_url or "",
        "namespace": night.namespace,
        "deadline_ms": 3_000.0,
        "l2_deadline_ms": 500.0,
        "poll_s": 0.1,
        "blocklist_poll_s": 0.1,
        "heartbeat_s": 0.2,
    }
    return ServingConfig(**(values | changes))


@contextlib.asynccontextmanager
async def serving(night: NightConfig, **changes: Any) -> AsyncIterator[Running]:
    """Start the application and stop it as a server would."""
    app = create_app(settings(night, **PATIENT | changes))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=BASE) as http:
        yield Running(http, app.state.service, app.state.tls)


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> bool:
    """Poll `condition` until it holds or a time limit is over; return whether it held."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout_s
    while loop.time() < give_up:
        if await condition():
            return True
        await asyncio.sleep(0.02)
    return False
