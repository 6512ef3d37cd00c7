"""Control plane of L2: pointer, heartbeats, announcements and INFO, by redis-py at leisure."""

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

# Allowed at full memory: a replica that cannot say that it lives looks dead, and what it holds would be retired. The
# new payload before the old one goes: at no moment may what is held look as if it were not.
_HEARTBEAT_SCRIPT = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
if ARGV[3] and ARGV[3] ~= ARGV[2] then redis.call('ZREM', KEYS[1], ARGV[3]) end
return 1
"""


class ControlPlane(Protocol):
    """Commands on a namespace's control keys; everything here raises TierUnavailable.

    The first four are how servers are reached, and all that one server and a cluster do in ways of their own.
    """

    keyspace: Keyspace

    async def execute(self, *command: CommandArgument) -> Any:
        """The reply to a command on a control key."""
        ...

    async def execute_all(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Any]:
        """Replies to all commands on control keys, in one round trip; the first refusal is raised."""
        ...

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        """The reply of every server to a command without a key; TierUnavailable, not raised, of one without a reply."""
        ...

    def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Messages of a channel, the keyspace's own unless named: b"pointer", b"next" and the like."""
        ...

    async def watch(self) -> tuple[bytes | None, bytes | None]:
        """Read the live pointer's JSON and the staging note's at one moment; None for a missing one."""
        pointer_and_note = await self.execute("MGET", self.keyspace.live, self.keyspace.next)
        if len(pointer_and_note) != 2:
            with as_unavailable():
                refuse_reply("MGET", pointer_and_note, "two values")
        pointer, staging_note = pointer_and_note
        return cast(bytes | None, pointer), cast(bytes | None, staging_note)

    async def time(self) -> float:
        """Redis' own clock, Unix seconds: replicas and publishers may run on hosts whose clocks differ."""
        seconds, microseconds = await self.execute("TIME")
        return float(seconds) + float(microseconds) / 1e6

    async def heartbeat(self, payload: bytes, beat_at_s: float, previous_payload: bytes | None = None) -> None:
        """Register a replica's generations: a member of the sorted set of replicas, scored `beat_at_s` (Redis' time).

        It replaces the replica's payload `previous_payload`, in one step, also while Redis is at maxmemory.
        """
        replicas_key, previous_payloads = (
            self.keyspace.replicas,
            () if previous_payload is None else (previous_payload,),
        )
        await self.execute("EVAL", _HEARTBEAT_SCRIPT, 1, replicas_key, beat_at_s, payload, *previous_payloads)

    async def sign_off(self, payload: bytes) -> None:
        """Takes a replica's last payload away; Redis removes at maxmemory too."""
        await self.execute("ZREM", self.keyspace.replicas, payload)

    async def infos(self) -> list[dict[str, Any]]:
        """`INFO` of every server."""
        replies = await self.execute_on_servers("INFO")
        for reply in replies:
            if isinstance(reply, TierUnavailable):
                raise reply
        return replies

    async def eviction_policy(self) -> str:
        """`maxmemory-policy` of the first answering server that may evict pages (`allkeys-*`), else of any."""
        replies = await self.execute_on_servers("INFO", "memory")
        policies = [str(reply.get("maxmemory_policy", "")) for reply in replies if type(reply) is dict]
        if not policies:
            raise replies[0]
        return next((policy for policy in policies if policy.startswith("allkeys")), policies[0])


class ServerControl(ControlPlane):
    """Control plane of one server, over `pool`; `renew` has readers leave a server that became a replica in place.

    Such a one keeps its connections and answers reads; only a write tells.
    """

    def __init__(self, keyspace: Keyspace, pool: ConnectionPool, renew: Callable[[], None]) -> None:
        self.keyspace = keyspace
        self._client: Redis = check_replies(Redis(connection_pool=pool))
        self._renew = renew

    async def execute(self, *command: CommandArgument) -> Any:
        """The reply to any command."""
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
        """Replies to all commands, in one round trip; the first refusal is raised."""
        with as_unavailable():
            async with self._leave_if_read_only(), self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        """The reply of this one server, or the TierUnavailable that it is without."""
        try:
            return [await self.execute(*command)]
        except TierUnavailable as error:
            return [error]

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Messages of a channel; ends with TierUnavailable when the connection does."""
        # Around the end of the subscription, too: it may meet a connection that is gone.
        with as_unavailable(), refusing_unreadable("SUBSCRIBE", "a message"):
            async with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
                await subscription.subscribe(channel or self.keyspace.channel)
                async for message in subscription.listen():
                    yield checked_reply("SUBSCRIBE", message["data"], TEXT_SHAPE)

    async def aclose(self) -> None:
        """End commands under way and close the pool."""
        await self._client.aclose(close_connection_pool=True)
