"""The parts of a service that accept events, over a real Redis, without the rest of the service."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from cache.config.events import EventsConfig
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.blocklist import Blocklist
from serving.config.settings import ServingConfig
from serving.events.connection import EventsFull, EventsUnavailable
from serving.events.intake import EventParts
from serving.requests.errors import Problem


@dataclass
class Intake:
    """Parts of one process, and its counts."""

    parts: EventParts
    keyspace: Keyspace
    blocklist: Blocklist = Blocklist()  # noqa: RUF009  frozen
    newest_position: Position = STREAM_BEGINNING

    async def accept_events(self, *events: Mapping[str, Any]) -> dict[str, Any]:
        """Return the receipt of a request with these events; raises Problem."""
        return await self.parts.intake.accept_events([*events])

    @property
    def results(self) -> Mapping[str, int]:
        """Counts of events by outcome."""
        return self.parts.intake.counts.count_by_result


@contextlib.asynccontextmanager
async def intake(
    url: str, keyspace: Keyspace, name: str = "one", *, inbox: bool = False, **events: Any
) -> AsyncIterator[Intake]:
    """Start and stop the parts as a service does; the inbox is read only with `inbox`."""
    config = ServingConfig(namespace=keyspace.namespace, events_url=url, events=EventsConfig(enabled=True, **events))
    parts = EventParts.of(config, name, lambda: running_intake.blocklist, lambda: running_intake.newest_position)
    running_intake = Intake(parts, keyspace)
    if inbox:
        await running_intake.parts.start()
    try:
        yield running_intake
    finally:
        await running_intake.parts.aclose()


def event(number: int, user: str = "u", **more: Any) -> dict[str, Any]:
    """Return an event with an id of its own."""
    return {"user": user, "item": f"i-{number}", "id": f"e-{number}", "time": 1_700_000_000 + number} | more


def rejected(client: Any, keyspace: Keyspace) -> list[dict[str, str]]:
    """Return the stored rejected events."""
    return [
        {name.decode(): value.decode() for name, value in fields.items()}
        for _, fields in client.xrange(keyspace.rejected_events)
    ]


UNTAKEN = (EventsFull, EventsUnavailable, Problem)
"""Errors after which the same events are sent again."""
