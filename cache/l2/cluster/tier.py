"""L2 on a Redis Cluster: the tier of `cache.l2.tier`, one for each master."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from redis.crc import key_slot
from redis.exceptions import MovedError

from cache.control.hot_keys import Name, Report
from cache.errors import TierUnavailable
from cache.format.keys import Keyspace
from cache.l2.circuit_breaker import Breaker, State
from cache.l2.cluster.fan_out import Scatter, Slots
from cache.l2.cluster.nodes import Nodes
from cache.l2.commands import Answer, Command, OverlayWrite, PageRead, Read
from cache.l2.lease_commands import Lease
from cache.l2.pipeline import Keep, as_it_is
from cache.l2.pool import SECOND_LOOK_S, deadline_for
from cache.l2.slots import is_cluster
from cache.l2.tier import RemoteConfig, RemoteTier

T = TypeVar("T")
_STATES: tuple[State, ...] = ("closed", "half_open", "open")


class Breakers:
    """Circuit breakers of all nodes as one: the worst of them."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    @property
    def state(self) -> State:
        """State of the node that is worst off; "closed" while none is known."""
        states = [tier.breaker.state for tier in self._nodes.tiers]
        return max(states, key=_STATES.index, default="closed")

    @property
    def opened(self) -> int:
        """Times that any node's breaker opened, nodes that left included."""
        return self._nodes.gone_opened + sum(tier.breaker.opened for tier in self._nodes.tiers)


class ClusterTier:
    """Sends each command to the node that holds its key; a node that is down costs only the keys that it holds.

    The control keys have one slot, so the node that serves it is asked as a single server would be.
    """

    def __init__(
        self,
        config: RemoteConfig,
        keyspace: Keyspace,
        new_breaker: Callable[[], Breaker] = Breaker,
    ) -> None:
        self.config = config
        self.keyspace = keyspace
        self.nodes = Nodes(config, keyspace, new_breaker)
        self.breaker = Breakers(self.nodes)
        self._slots = Slots(keyspace)
        self._home_slot = key_slot(keyspace.live.encode())
        self._listened = 0

    @property
    def batches(self) -> int:
        """Pipelines sent."""
        return self.nodes.gone_batches + sum(tier.batches for tier in self.nodes.tiers)

    @property
    def commands(self) -> int:
        """Commands sent."""
        return self.nodes.gone_commands + sum(tier.commands for tier in self.nodes.tiers)

    @property
    def shed(self) -> int:
        """Commands not sent because too many were under way."""
        return self.nodes.gone_shed + sum(tier.shed for tier in self.nodes.tiers)

    async def read(self, reads: Sequence[Read]) -> list[Answer]:
        """Answers, one per read: the record or overlay, None where there is none, else why it is not known."""
        return list(await self._submit(reads)) if reads else []

    def submit(
        self, reads: Sequence[Command], keep: Callable[[Sequence[Answer]], T]
    ) -> asyncio.Future[T]:
        """A future of what `keep` makes of the answers to one read or more, from the nodes that hold the keys."""
        return cast(asyncio.Future[T], self._submit(reads, keep))

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """A future of the answer to `command`, from the node that holds the lease."""
        return cast(
            asyncio.Future[bytes | TierUnavailable | None],
            self._submit((command,), lambda answers: answers[0]),
        )

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Stores each overlay; None where it was. A lease, on another node, says "done" once its answer is stored."""
        if not writes:
            return []
        answers = await self._submit([write._replace(mark=None) for write in writes])
        stored = [each if isinstance(each, TierUnavailable) else None for each in answers]
        marks = [
            write.mark
            for write, failed in zip(writes, stored, strict=True)
            if write.mark is not None and failed is None
        ]
        if marks:
            await self._submit(marks)  # without it the lease ends by itself
        return stored

    def _submit(self, commands: Sequence[Command], keep: Keep = as_it_is) -> asyncio.Future[Any]:
        return Scatter(commands, keep, self.nodes, self._slots, self.config.deadline_s).send()

    def bound_s(self) -> float:
        """Bound in seconds for a read that is sent now; what is redirected may take one deadline more."""
        tiers = self.nodes.tiers
        if not tiers:
            commands = self.config.batch_commands_max
            return deadline_for(2 * self.config.deadline_s + SECOND_LOOK_S, commands)
        return self.config.deadline_s + max(tier.bound_s() for tier in tiers)

    def p99_ms(self, within_s: float = 5.0) -> float | None:
        """99th percentile in ms of the slowest node's round trips of the last `within_s`; None when there were none."""
        found = [each for tier in self.nodes.tiers if (each := tier.p99_ms(within_s)) is not None]
        return max(found, default=None)

    async def ping(self) -> None:
        """Raises TierUnavailable unless the node of the control keys answers."""
        await self._home(lambda tier: tier.ping())

    async def watch(self) -> tuple[bytes | None, bytes | None]:
        """The live pointer's JSON and the staging note's, as of one moment; None for what is not there."""
        return await self._home(lambda tier: tier.watch())

    async def time(self) -> float:
        """The clock of the node that holds the control keys, Unix seconds."""
        return await self._home(lambda tier: tier.time())

    async def heartbeat(self, replica_id: str, payload: bytes, at: float) -> None:
        """Registers what this replica holds, at the node of the control keys, scored `at` (Redis' time)."""
        await self._home(lambda tier: tier.heartbeat(replica_id, payload, at))

    async def sign_off(self, replica_id: str) -> None:
        """Takes a replica's last payload away, at the node of the control keys."""
        await self._home(lambda tier: tier.sign_off(replica_id))

    async def report_hot(self, report: Report) -> None:
        """Adds to the sketch of recent requests, at the node of the control keys, what this replica was asked for."""
        await self._home(lambda tier: tier.report_hot(report))

    async def hot(self, hour: int) -> list[Name]:
        """Names that all replicas were asked for most in this hour and the last, hottest first."""
        return await self._home(lambda tier: tier.hot(hour))

    async def cold(self, day: int) -> list[Name]:
        """Names that all replicas were asked for this day and the last and no generation knew, most asked first."""
        return await self._home(lambda tier: tier.cold(day))

    async def ask(self, *command: str | bytes | float) -> Any:
        """The reply of the control keys' node to a command, at leisure; TierUnavailable when there is none."""
        return await self._home(lambda tier: tier.ask(*command))

    async def page(self, read: PageRead) -> bytes | None:
        """A page or a part of it from the node that holds it, None where there is none; at leisure."""
        return await self._on(self._slots.of_one(read), lambda tier: tier.page(read))

    async def eviction_policy(self) -> str:
        """Policy of the first answering node that may evict pages, else of any; TierUnavailable when none answers."""
        await self.nodes.ready()
        found = await asyncio.gather(
            *(tier.eviction_policy() for tier in self.nodes.tiers), return_exceptions=True
        )
        policies = [each for each in found if isinstance(each, str)]
        for error in found if not policies else ():
            if isinstance(error, BaseException):
                raise error
        return next((each for each in policies if each.startswith("allkeys")), *policies[:1])

    async def ask_all(self, commands: Sequence[tuple[str | bytes | float, ...]]) -> list[Any]:
        """Replies to all commands, for keys that lie with the control keys; the first refusal is raised."""
        return await self._home(lambda tier: tier.ask_all(commands))

    async def infos(self) -> list[dict[str, Any]]:
        """`INFO` of all nodes; raises TierUnavailable when one does not answer."""
        await self.nodes.ready()
        found = await asyncio.gather(*(tier.infos() for tier in self.nodes.tiers))
        return [each for told in found for each in told]

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Messages of a channel from one node: every node passes them on; after an error the next is listened to."""
        await self.nodes.ready()
        tiers = self.nodes.tiers
        tier = tiers[self._listened % len(tiers)]
        self._listened += 1
        async with contextlib.aclosing(tier.subscribe(channel)) as messages:
            async for message in messages:
                yield message

    async def _home(self, ask: Callable[[RemoteTier], Awaitable[T]]) -> T:
        """Asks the node of the control keys."""
        return await self._on(self._home_slot, ask)

    async def _on(self, slot: int, ask: Callable[[RemoteTier], Awaitable[T]]) -> T:
        """Asks the node of a slot; once more after a look at the map if its keys are elsewhere by now."""
        await self.nodes.ready()
        try:
            return await ask(self._of_slot(slot))
        except TierUnavailable as error:
            if not isinstance(error.__cause__, MovedError):
                self.nodes.refresh_soon()
                raise
        await self.nodes.refresh()
        return await ask(self._of_slot(slot))

    def _of_slot(self, slot: int) -> RemoteTier:
        tier = self.nodes.of_slot(slot)
        if tier is None:
            self.nodes.refresh_soon()
            raise TierUnavailable(
                f"no node of the Redis Cluster serves slot {slot}", reason="connection"
            )
        return tier

    async def aclose(self) -> None:
        """Closes every connection; reads under way end as unavailable."""
        await self.nodes.aclose()


def open_tier(
    config: RemoteConfig, keyspace: Keyspace, new_breaker: Callable[[], Breaker]
) -> RemoteTier | ClusterTier:
    """The tier that the URL of L2 asks for: of one server, or of a Redis Cluster."""
    if is_cluster(config.url):
        return ClusterTier(config, keyspace, new_breaker)
    return RemoteTier(config, keyspace, new_breaker())
