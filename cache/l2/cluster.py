"""L2 on a Redis Cluster: a tier for each node, commands scattered over them, and the control plane of the home node."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeVar

from redis.crc import key_slot
from redis.exceptions import MovedError

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import (
    AskingCommand,
    Command,
    Frames,
    L2Result,
    Lease,
    OverlayRead,
    OverlayWrite,
    PageRead,
    PageReads,
)
from cache.l2.control_plane import CommandArgument, ControlPlane
from cache.l2.data_plane import Breaker, DataPlane, DataPlaneStats
from cache.l2.errors import Redirected
from cache.l2.pool import SECOND_LOOK_S, deadline_for
from cache.l2.slots import (
    SLOTS,
    Owners,
    PageSlots,
    address_of,
    is_cluster,
    node_url,
    owners_of,
    seed_urls,
)
from cache.l2.tier import Keep, PipelinePart, RemoteConfig, RemoteTier

REDIRECTS_MAX: Final = 3
"""Times that a command is sent on: from a stale map to the old owner, from there to the new one, once more for luck."""

REFRESH_PAUSE_S: Final = 1.0
"""Seconds between two looks at the slot map that somebody's trouble asks for: a dead node costs one look per second."""

_REMEMBERED_TABLES_MAX: Final = 16
_NO_MAP_MESSAGE: Final = "no node of the Redis Cluster has told yet who serves which slot"
T = TypeVar("T")
log = logging.getLogger(__name__)


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
        self._slots = CommandSlots(keyspace)

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
            raise TierUnavailable(_NO_MAP_MESSAGE, reason="connection")
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


class CommandSlots:
    """The slot of every command's key; a table's pages are remembered."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self._pages: dict[tuple[str, str], PageSlots] = {}

    def of(self, commands: Sequence[Command]) -> Iterable[int]:
        """Slots of the commands' keys, in order."""
        if isinstance(commands, PageReads):
            slot_of = self._table(commands.generation, commands.table).__getitem__
            return map(slot_of, commands.pages.tolist())
        return map(self.of_one, commands)

    def of_one(self, command: Command) -> int:
        """Slot of one command's key."""
        if isinstance(command, PageRead):
            return self._table(command.generation, command.table)[command.page]
        if isinstance(command, OverlayRead | OverlayWrite):
            name = self._keys.overlay(command.generation, command.table, command.hash_hex)
            return key_slot(name.encode())
        if isinstance(command, AskingCommand):
            return self.of_one(command.command)
        return key_slot(command.key.encode())

    def _table(self, generation: str, table: str) -> PageSlots:
        page_slots = self._pages.get((generation, table))
        if page_slots is None:
            if len(self._pages) >= _REMEMBERED_TABLES_MAX:
                self._pages.clear()
            page_slots = self._pages[generation, table] = PageSlots(self._keys, generation, table)
        return page_slots


class Scatter:
    """A scatter that ends when the last node has answered or its own tier gave it up: each has its own deadline only.

    What a node redirects is sent on, `REDIRECTS_MAX` times at most and within `window_s` of the first one.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        keep: Keep,
        nodes: Nodes,
        slots: CommandSlots,
        window_s: float,
    ) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands, self._nodes, self._slots, self._window_s = commands, nodes, slots, window_s
        self._part = PipelinePart(commands, b"", 0, self.result, keep)
        self._answers: list[L2Result] = []
        self._columns: list[tuple[Sequence[int], Frames]] = []
        self._parts = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self) -> "asyncio.Future[Any]":
        """Sends each node its own commands; returns the future of what `keep` makes of the answers, awaits nothing."""
        groups: dict[RemoteTier | None, list[int]] = {}
        owner = self._nodes.of_slot
        for index, slot in enumerate(self._slots.of(self._commands)):
            groups.setdefault(owner(slot), []).append(index)
        if len(groups) == 1:
            (tier,) = groups
            if tier is not None:
                tier.submit(self._commands, self._all_landed)
                return self.result
        self._expect(len(groups))
        for tier, indexes in groups.items():
            if tier is None:
                self._fail_unserved(indexes)
            else:
                tier.submit(
                    _select_commands(self._commands, indexes), partial(self._landed, indexes, 0)
                )
        return self.result

    def _expect(self, parts: int) -> None:
        unavailable = TierUnavailable("Redis did not answer in time", reason="timeout")
        self._answers = [unavailable] * len(
            self._commands
        )  # also what has not landed at the window's end
        self._parts = parts

    def _all_landed(self, answers: Sequence[L2Result]) -> None:
        if isinstance(answers, Frames):  # as they are, for who reads columns
            self._part.land(answers)
            return
        self._expect(1)
        self._landed(range(len(answers)), 0, answers)

    def _fail_unserved(self, indexes: Sequence[int]) -> None:
        self._nodes.refresh_soon()
        unavailable = TierUnavailable(
            "no node of the Redis Cluster serves this slot", reason="connection"
        )
        self._landed(indexes, REDIRECTS_MAX, [unavailable] * len(indexes))

    def _landed(self, indexes: Sequence[int], hop: int, answers: Sequence[L2Result]) -> None:
        if self.result.done():  # by whoever left, or by the window's end
            return
        try:
            self._merge_results(indexes, hop, answers)
        except Exception as error:  # whatever a node said: who waits has no other end
            log.exception("what a node answered cannot be taken")
            strange = TierUnavailable(f"a strange answer: {error!r}", reason="connection")
            self._part.land([strange] * len(self._commands))

    def _merge_results(self, indexes: Sequence[int], hop: int, answers: Sequence[L2Result]) -> None:
        self._parts -= 1
        if isinstance(answers, Frames):
            self._columns.append((indexes, answers))
        else:
            moved: list[int] = []
            for index, answer in zip(indexes, answers, strict=True):
                self._answers[index] = answer
                if isinstance(answer, TierUnavailable):
                    moved.append(index)
            if moved:
                self._follow(moved, hop)
        if not self._parts:
            self._end()

    def _follow(self, indexes: Sequence[int], hop: int) -> None:
        """Send on what was redirected; a node that failed makes its keys misses and the map worth a look."""
        onward: dict[tuple[str, bool], list[int]] = {}
        for index in indexes:
            answer = self._answers[index]
            if not isinstance(answer, Redirected):
                self._nodes.refresh_soon()
            elif hop < REDIRECTS_MAX:
                onward.setdefault((answer.address, answer.is_ask), []).append(index)
                if not answer.is_ask:
                    self._nodes.learn(answer.slot, answer.address)
        self._parts += len(onward)
        if onward and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window_s, self._end)
        for (address, is_ask), redirected_indexes in onward.items():
            commands = [self._commands[index] for index in redirected_indexes]
            self._nodes.at(address).submit(
                [AskingCommand(command) for command in commands] if is_ask else commands,
                partial(self._landed, redirected_indexes, hop + 1),
            )

    def _end(self) -> None:
        """Ends with what there is; a command that is still on its way was not answered in time, or only redirected."""
        if self._timer is not None:
            self._timer.cancel()
        if sum(len(indexes) for indexes, _ in self._columns) == len(self._commands):
            self._part.land(Frames.merged(self._columns))  # for who reads columns
            return
        for indexes, frames in self._columns:
            for index, payload in zip(indexes, frames.payloads(), strict=True):
                self._answers[index] = payload
        self._part.land(self._answers)


def _select_commands(commands: Sequence[Command], indexes: Sequence[int]) -> Sequence[Command]:
    if isinstance(commands, PageReads):
        pages, offsets = commands.pages.take(indexes), commands.offsets.take(indexes)
        return PageReads(commands.generation, commands.table, pages, offsets, commands.length)
    return [commands[index] for index in indexes]
