"""Intakes of tests: the parts that take events in, over a real Redis, without the rest of a service."""

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
    """Parts of one process, and its numbers."""

    parts: EventParts
    keyspace: Keyspace
    blocklist: Blocklist = Blocklist()  # noqa: RUF009  frozen
    newest_position: Position = STREAM_BEGINNING

    async def accept_events(self, *events: Mapping[str, Any]) -> dict[str, Any]:
        """What a request with these events is answered; raises Problem."""
        return await self.parts.intake.accept_events([*events])

    @property
    def results(self) -> Mapping[str, int]:
        """Counts by what became of events."""
        return self.parts.intake.counts.count_by_result


@contextlib.asynccontextmanager
async def intake(
    url: str, keyspace: Keyspace, name: str = "one", *, inbox: bool = False, **events: Any
) -> AsyncIterator[Intake]:
    """Started and stopped as a service does; the inbox is left alone unless `inbox`."""
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
    """An event of its own id."""
    return {"user": user, "item": f"i-{number}", "id": f"e-{number}", "time": 1_700_000_000 + number} | more


def rejected(client: Any, keyspace: Keyspace) -> list[dict[str, str]]:
    """Rejected events as they are kept."""
    return [
        {name.decode(): value.decode() for name, value in fields.items()}
        for _, fields in client.xrange(keyspace.rejected_events)
    ]


UNTAKEN = (EventsFull, EventsUnavailable, Problem)
"""Errors after which the same events are sent again."""
