"""L2 on a Redis Cluster: the tier of `cache.l2.tier`, one for each master."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TypeVar

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.circuit_breaker import Breaker
from cache.l2.cluster.control import ClusterControl
from cache.l2.cluster.fan_out import Scatter, Slots
from cache.l2.cluster.nodes import Nodes
from cache.l2.commands import Command, L2Result, OverlayWrite, PageRead
from cache.l2.data_plane import DataPlane, DataPlaneStats
from cache.l2.lease_commands import Lease
from cache.l2.pool import SECOND_LOOK_S, deadline_for
from cache.l2.slots import is_cluster
from cache.l2.tier import RemoteConfig, RemoteTier

T = TypeVar("T")


class ClusterTier:
    """Sends each command to the node that holds its key; a node that is down costs only the keys that it holds."""

    def __init__(
        self,
        config: RemoteConfig,
        keyspace: Keyspace,
        new_breaker: Callable[[], Breaker] = Breaker,
    ) -> None:
        self.nodes = Nodes(config, keyspace, new_breaker)
        self.control = ClusterControl(keyspace, self.nodes)
        self._config = config
        self._slots = Slots(keyspace)

    @property
    def stats(self) -> DataPlaneStats:
        """Counts of all nodes together, and the breaker of the one that is worst off."""
        return self.nodes.stats

    def submit(
        self, commands: Sequence[Command], keep: Callable[[Sequence[L2Result]], T]
    ) -> asyncio.Future[T]:
        """A future of what `keep` makes of the answers to at least one command, from the nodes that hold the keys."""
        return Scatter(commands, keep, self.nodes, self._slots, self._config.deadline_s).send()

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """A future of the answer to `command`, from the node that holds the lease."""
        return self.submit((command,), itemgetter(0))

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Stores each overlay; None where it was. A lease, on another node, says "done" once its answer is stored."""
        if not writes:
            return []
        answers = await self.submit([write._replace(lease_mark=None) for write in writes], list)
        failures = [answer if isinstance(answer, TierUnavailable) else None for answer in answers]
        lease_marks = [
            write.lease_mark
            for write, failed in zip(writes, failures, strict=True)
            if write.lease_mark is not None and failed is None
        ]
        if lease_marks:
            await self.submit(lease_marks, list)  # without it the lease ends by itself
        return failures

    async def page(self, read: PageRead) -> bytes | None:
        """A page or a part of it from the node that holds it, None where there is none; at leisure."""
        return await self.nodes.call_owner(self._slots.of_one(read), lambda tier: tier.page(read))

    def bound_s(self) -> float:
        """Bound in seconds for a read that is sent now; what is redirected may take one deadline more."""
        deadline_s, tiers = self._config.deadline_s, self.nodes.tiers
        if not tiers:
            return deadline_for(2 * deadline_s + SECOND_LOOK_S, self._config.batch_commands_max)
        return deadline_s + max(tier.bound_s() for tier in tiers)

    def p99_ms(self, within_s: float = 5.0) -> float | None:
        """99th percentile in ms of the slowest node's round trips of the last `within_s`; None when there were none."""
        node_p99s_ms = [
            node_p99_ms
            for tier in self.nodes.tiers
            if (node_p99_ms := tier.p99_ms(within_s)) is not None
        ]
        return max(node_p99s_ms, default=None)

    async def connect_ahead(self) -> None:
        """Opens a connection to each node before the first read comes; raises nothing."""
        with suppress(TierUnavailable):
            await self.nodes.ready()
        await asyncio.gather(*[tier.connect_ahead() for tier in self.nodes.tiers])

    async def aclose(self) -> None:
        """Closes every connection; reads under way end as unavailable."""
        await self.nodes.aclose()


def open_tier(
    config: RemoteConfig, keyspace: Keyspace, new_breaker: Callable[[], Breaker]
) -> DataPlane:
    """The data plane that the URL of L2 asks for: of one server, or of a Redis Cluster."""
    if is_cluster(config.url):
        return ClusterTier(config, keyspace, new_breaker)
    return RemoteTier(config, keyspace, new_breaker())
