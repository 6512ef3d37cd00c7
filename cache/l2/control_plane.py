"""Control plane of L2: pointer, heartbeats, announcements and INFO, through redis-py and without tight deadlines."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ReadOnlyError

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.errors import as_unavailable
from cache.l2.resp import TEXT_SHAPE, check_replies, checked_reply, refuse_reply, refusing_unreadable

CommandArgument = str | bytes | float

# Allowed at maxmemory: a replica without heartbeats counts as dead, and its generations would be retired. Add the new
# payload before removing the old one, so that the replica's generations are registered at every moment.
_HEARTBEAT_SCRIPT = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
if ARGV[3] and ARGV[3] ~= ARGV[2] then redis.call('ZREM', KEYS[1], ARGV[3]) end
return 1
"""


class ControlPlane(Protocol):
    """Commands on a namespace's control keys; all of them raise TierUnavailable.

    Only the first four methods differ between a single server and a cluster.
    """

    keyspace: Keyspace

    async def execute(self, *command: CommandArgument) -> Any:
        """Return the reply to a command on a control key."""
        ...

    async def execute_all(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Any]:
        """Return the replies to commands on control keys, in one round trip; raise the first error reply."""
        ...

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        """Return every server's reply to a command without a key.

        For a server without a reply the element is a TierUnavailable, which is not raised.
        """
        ...

    def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yield messages of a channel (default: the keyspace's channel), such as b"pointer" and b"next"."""
        ...

    async def watch(self) -> tuple[bytes | None, bytes | None]:
        """Read the live pointer's JSON and the staging note's in one command; None for a missing value."""
        pointer_and_note = await self.execute("MGET", self.keyspace.live, self.keyspace.staging_note)
        if len(pointer_and_note) != 2:
            with as_unavailable():
                refuse_reply("MGET", pointer_and_note, "two values")
        pointer, staging_note = pointer_and_note
        return cast(bytes | None, pointer), cast(bytes | None, staging_note)

    async def time(self) -> float:
        """Return Redis' clock in Unix seconds: the clocks of replicas and publishers may differ."""
        seconds, microseconds = await self.execute("TIME")
        return float(seconds) + float(microseconds) / 1e6

    async def heartbeat(
        self, heartbeat_payload: bytes, beat_at_s: float, previous_heartbeat_payload: bytes | None = None
    ) -> None:
        """Register a replica's generations: add `heartbeat_payload` to the replicas, scored `beat_at_s` (Redis' time).

        Replaces `previous_heartbeat_payload` atomically, even while Redis is at maxmemory.
        """
        replicas_key, previous_payloads = (
            self.keyspace.replicas,
            () if previous_heartbeat_payload is None else (previous_heartbeat_payload,),
        )
        await self.execute("EVAL", _HEARTBEAT_SCRIPT, 1, replicas_key, beat_at_s, heartbeat_payload, *previous_payloads)

    async def sign_off(self, heartbeat_payload: bytes) -> None:
        """Remove a replica's last payload; Redis allows this at maxmemory, too."""
        await self.execute("ZREM", self.keyspace.replicas, heartbeat_payload)

    async def infos(self) -> list[dict[str, Any]]:
        """Return the `INFO` of every server."""
        replies = await self.execute_on_servers("INFO")
        for reply in replies:
            if isinstance(reply, TierUnavailable):
                raise reply
        return replies

    async def eviction_policy(self) -> str:
        """Return `maxmemory-policy` of the first server that may evict pages (`allkeys-*`), else of any server."""
        replies = await self.execute_on_servers("INFO", "memory")
        policies = [str(reply.get("maxmemory_policy", "")) for reply in replies if type(reply) is dict]
        if not policies:
            raise replies[0]
        return next((policy for policy in policies if policy.startswith("allkeys")), policies[0])


class ServerControl(ControlPlane):
    """Control plane of one server, over `pool`.

    `renew_connections` closes the readers' connections if the server has become a replica. A server that became a
    replica keeps its connections and answers reads; only a write reveals the change.
    """

    def __init__(self, keyspace: Keyspace, pool: ConnectionPool, renew_connections: Callable[[], None]) -> None:
        self.keyspace = keyspace
        self._client: Redis = check_replies(Redis(connection_pool=pool))
        self._renew = renew_connections

    async def execute(self, *command: CommandArgument) -> Any:
        """Return the reply to any command."""
        with as_unavailable():
            async with self._leave_if_read_only():
                return await self._client.execute_command(*command)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _leave_if_read_only(self) -> AsyncIterator[None]:
        try:
            yield
        except ReadOnlyError:
            await self._client.connection_pool.disconnect()
            self._renew()
            raise

    async def execute_all(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Any]:
        """Return the replies to all commands, in one round trip; raise the first error reply."""
        with as_unavailable():
            async with self._leave_if_read_only(), self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        """Return this server's reply, or a TierUnavailable, as the only element."""
        try:
            return [await self.execute(*command)]
        except TierUnavailable as error:
            return [error]

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yield messages of a channel; raises TierUnavailable when the connection ends."""
        # Covers the end of the subscription as well: its connection may be gone.
        with as_unavailable(), refusing_unreadable("SUBSCRIBE", "a message"):
            async with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
                await subscription.subscribe(channel or self.keyspace.channel)
                async for message in subscription.listen():
                    yield checked_reply("SUBSCRIBE", message["data"], TEXT_SHAPE)

    async def aclose(self) -> None:
        """End pending commands and close the pool."""
        await self._client.aclose(close_connection_pool=True)
