"""The nodes of a Redis Cluster as readers use them: a tier for each, and which of them serves a slot."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from redis.exceptions import MovedError

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.circuit_breaker import Breaker
from cache.l2.data_plane import DataPlaneStats
from cache.l2.slots import SLOTS, Owners, address_of, node_url, owners_of, seed_urls
from cache.l2.tier import RemoteConfig, RemoteTier

REFRESH_PAUSE_S: Final = 1.0
"""Seconds between two looks at the slot map that somebody's trouble asks for: a dead node costs one look per second."""

T = TypeVar("T")
_NO_MAP: Final = "no node of the Redis Cluster has told yet who serves which slot"


class Nodes:
    """A registry of one tier per master, each with its own connections and breaker: a dead one holds up no other.

    The map is looked up again whenever a node redirects or fails; a redirection counts at once.
    """

    def __init__(
        self, config: RemoteConfig, keyspace: Keyspace, new_breaker: Callable[[], Breaker]
    ) -> None:
        self.refreshes = 0
        self._config, self._keyspace, self._new_breaker = config, keyspace, new_breaker
        self._seeds = seed_urls(config.url)
        self._tiers: dict[str, RemoteTier] = {}
        self._owners: list[RemoteTier | None] = [None] * SLOTS
        self._unlisted: set[str] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._retired_stats = DataPlaneStats()

    @property
    def tiers(self) -> list[RemoteTier]:
        """Tiers of all nodes that are known."""
        return list(self._tiers.values())

    @property
    def stats(self) -> DataPlaneStats:
        """Stats of all nodes together, counts of those that left included: counters never fall."""
        return sum((tier.stats for tier in self._tiers.values()), self._retired_stats)

    def of_slot(self, slot: int) -> RemoteTier | None:
        """The tier of the node that serves a slot, None where that is not known."""
        return self._owners[slot]

    def at(self, address: str) -> RemoteTier:
        """The tier of the node at "host:port", which connects when it is first used."""
        tier = self._tiers.get(address)
        if tier is None:
            tier = self._tiers[address] = self._open(node_url(self._seeds[0], address))
        return tier

    def learn(self, slot: int, address: str) -> None:
        """Records a redirection: the node at `address` serves this slot; looks at the map again soon."""
        self._owners[slot] = self.at(address)
        self.refresh_soon()

    def refresh_soon(self) -> None:
        """Look at the map again in the background, unless that was done within the last second."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._refreshed_at >= REFRESH_PAUSE_S and not self._is_closed:
            self._refresh()

    async def ready(self) -> None:
        """Return once there is a map; raises TierUnavailable when no node tells one."""
        if not self._tiers:
            await self.refresh()

    async def call_owner(self, slot: int, call: Callable[[RemoteTier], Awaitable[T]]) -> T:
        """The result of a call on the node that serves a slot, at leisure; raises TierUnavailable.

        Once more after a look at the map if its keys are elsewhere by now.
        """
        await self.ready()
        try:
            return await call(self._serving(slot))
        except TierUnavailable as error:
            if not isinstance(error.__cause__, MovedError):
                self.refresh_soon()
                raise
        await self.refresh()
        return await call(self._serving(slot))

    async def refresh(self) -> None:
        """Look at the map now, together with whoever is looking already; TierUnavailable when no node tells it."""
        if self._is_closed:
            raise TierUnavailable("this client was closed", reason="connection")
        await asyncio.shield(self._refresh())

    async def aclose(self) -> None:
        """Closes every tier."""
        self._is_closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await asyncio.gather(*(tier.aclose() for tier in self._tiers.values()), *self._closing)

    def _serving(self, slot: int) -> RemoteTier:
        tier = self._owners[slot]
        if tier is None:
            self.refresh_soon()
            raise TierUnavailable(
                f"no node of the Redis Cluster serves slot {slot}", reason="connection"
            )
        return tier

    def _refresh(self) -> "asyncio.Task[None]":
        if self._refreshing is None:
            loop = asyncio.get_running_loop()
            self._refreshed_at = loop.time()
            self._refreshing = loop.create_task(self._refresh_map())
            self._refreshing.add_done_callback(self._finish_refresh)
        return self._refreshing

    def _finish_refresh(self, task: "asyncio.Task[None]") -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()  # whoever awaits it is told; nobody else has to be

    async def _refresh_map(self) -> None:
        """Adopts the first map without a gap, else the fullest: a node that came back empty knows only itself."""
        fullest_owners: Owners = {}
        # Those that are out of order last: each may cost a time-out.
        shuffled_tiers = sorted(self._tiers.items(), key=lambda _: random.random())
        for address, tier in sorted(
            shuffled_tiers,
            key=lambda address_and_tier: address_and_tier[1].breaker.state != "closed",
        ):
            fullest_owners = max(fullest_owners, await self._fetch_owners(tier, address), key=len)
            if len(fullest_owners) == SLOTS:
                break
        for url in self._seeds if len(fullest_owners) < SLOTS else ():
            if address_of(url) in self._tiers:
                continue
            seed = self._open(url)
            try:
                fullest_owners = max(
                    fullest_owners, await self._fetch_owners(seed, address_of(url)), key=len
                )
            finally:
                await seed.aclose()
            if len(fullest_owners) == SLOTS:
                break
        if not fullest_owners:
            raise TierUnavailable(_NO_MAP, reason="connection")
        self.refreshes += 1
        self._adopt(fullest_owners)

    async def _fetch_owners(self, tier: RemoteTier, address: str) -> Owners:
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                return owners_of(await tier.control.execute("CLUSTER SLOTS"), address)
        except (TierUnavailable, TimeoutError, ValueError, TypeError):
            return {}

    def _adopt(self, owners: Owners) -> None:
        tiers = {address: self.at(address) for address in set(owners.values())}
        self._owners = [
            None if address is None else tiers[address] for address in map(owners.get, range(SLOTS))
        ]
        absent = set(self._tiers) - set(tiers)
        # A node that left may still owe replies, and a slot on its way names one that serves nothing yet.
        for address in absent & self._unlisted:
            self._retire(self._tiers.pop(address))
        self._unlisted = absent & set(self._tiers)

    def _retire(self, tier: RemoteTier) -> None:
        self._retired_stats += replace(tier.stats, breaker="closed")
        task = asyncio.get_running_loop().create_task(tier.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open(self, url: str) -> RemoteTier:
        return RemoteTier(replace(self._config, url=url), self._keyspace, self._new_breaker())
