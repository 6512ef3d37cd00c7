"""Control plane of a Redis Cluster: the control keys have one slot, so their home node is asked as one server is."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from redis.crc import key_slot

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.cluster.nodes import Nodes
from cache.l2.control_plane import CommandArgument, ControlPlane


class ClusterControl(ControlPlane):
    """Control plane of the node that serves the control keys, wherever they move."""

    def __init__(self, keyspace: Keyspace, nodes: Nodes) -> None:
        self.keyspace = keyspace
        self._nodes = nodes
        self._home = key_slot(keyspace.live.encode())
        self._listened = 0

    async def execute(self, *command: CommandArgument) -> Any:
        """The reply of the control keys' node to a command."""
        return await self._nodes.call_owner(self._home, lambda tier: tier.control.execute(*command))

    async def execute_all(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Any]:
        """Replies to all commands, for keys that lie with the control keys; the first refusal is raised."""
        return await self._nodes.call_owner(
            self._home, lambda tier: tier.control.execute_all(commands)
        )

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        """The reply of every node; TierUnavailable, not raised, of one without a reply."""
        await self._nodes.ready()
        requests = (tier.control.execute(*command) for tier in self._nodes.tiers)
        replies = await asyncio.gather(*requests, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, TierUnavailable):
                raise reply
        return replies

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Messages of a channel from one node: every node passes them on; after an error the next is listened to."""
        await self._nodes.ready()
        tiers = self._nodes.tiers
        tier = tiers[self._listened % len(tiers)]
        self._listened += 1
        async with contextlib.aclosing(tier.control.subscribe(channel)) as messages:
            async for message in messages:
                yield message
