"""Requests to a running service about users with newer events."""

from typing import Any, NamedTuple

from tests.integration.fresh.events_world import EventWorld, until_counted
from tests.integration.serving_app import Running


class ServedWorld(NamedTuple):
    """A running service and its world."""

    app: Running
    world: EventWorld
    generation: str

    async def clicks(self, user: str, *items: str) -> None:
        """Accept events of a user, one after the other, and wait until they count."""
        self.world.accept([self.world.event(user, item) for item in items])
        await until_counted(self.app, self.world)

    async def get_answer(self, user: str, table: str = "user_topk", **query: Any) -> dict[str, Any]:
        """Return the answer to a GET."""
        return await self.app.get(f"/v1/lookup/{table}/{user}", **query)

    def expected(self, user: str) -> tuple[list[str], Any]:
        """Return the list of a night that has all events."""
        return self.world.expected(self.generation, [user])[user]
