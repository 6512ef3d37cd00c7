"""L2 on a Redis Cluster: one tier per node, commands distributed to nodes, and the control plane."""

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
    deadline_s_for,
)
from cache.l2.control_plane import CommandArgument, ControlPlane
from cache.l2.data_plane import Breaker, DataPlane, DataPlaneStats
from cache.l2.errors import Redirected
from cache.l2.pool import SECOND_LOOK_S
from cache.l2.slots import (
    SLOT_COUNT,
    PageSlots,
    SlotOwners,
    address_of,
    is_cluster,
    node_url,
    owners_from_reply,
    seed_urls,
)
from cache.l2.tier import Keep, PipelinePart, RemoteConfig, RemoteTier

REDIRECTS_MAX: Final = 3
"""Redirections that a command follows: from an outdated map to the old owner, from there to the new owner, and one
more."""

REFRESH_PAUSE_S: Final = 1.0
"""Shortest time in seconds between two lookups of the slot map after errors: a dead node costs one lookup per
second."""

_CACHED_TABLES_MAX: Final = 16
_NO_SLOT_MAP_MESSAGE: Final = "no node of the Redis Cluster has returned a slot map yet"
T = TypeVar("T")
log = logging.getLogger(__name__)


class ClusterTier:
    """Data plane of a Redis Cluster: sends each command to its key's node; a dead node affects only its own keys."""

    def __init__(self, config: RemoteConfig, keyspace: Keyspace, new_breaker: Callable[[], Breaker] = Breaker) -> None:
        self.nodes = Nodes(config, keyspace, new_breaker)
        self.control = ClusterControl(keyspace, self.nodes)
        self._config = config
        self._slots = CommandSlots(keyspace)

    @property
    def stats(self) -> DataPlaneStats:
        """Sum of the nodes' counts, and the worst of their breaker states."""
        return self.nodes.stats

    def submit(
        self, commands: Sequence[Command], convert_answers: Callable[[Sequence[L2Result]], T]
    ) -> asyncio.Future[T]:
        """Send one command or more to the keys' nodes; return a future of `convert_answers` applied to the answers."""
        return Scatter(commands, convert_answers, self.nodes, self._slots, self._config.deadline_s).send()

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """Send a command to the node that serves the lease's key; return a future of the answer."""
        return self.submit((command,), itemgetter(0))

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Store each overlay; return None for each success, else the error.

        Leases, whose nodes may differ, are marked afterwards.
        """
        if not writes:
            return []
        answers = await self.submit([write._replace(lease_mark=None) for write in writes], list)
        failures = [answer if isinstance(answer, TierUnavailable) else None for answer in answers]
        lease_marks = [
            write.lease_mark
            for write, failure in zip(writes, failures, strict=True)
            if write.lease_mark is not None and failure is None
        ]
        if lease_marks:
            await self.submit(lease_marks, list)  # if the mark fails, the lease expires
        return failures

    async def page(self, read: PageRead) -> bytes | None:
        """Read a page or a part of it from its node, on a connection without readers' commands.

        Returns None if there is none.
        """
        return await self.nodes.call_owner(self._slots.slot_of_command(read), lambda tier: tier.page(read))

    def bound_s(self) -> float:
        """Return the bound in seconds for a read sent now; a redirected one may take one deadline more."""
        deadline_s, tiers = self._config.deadline_s, self.nodes.tiers
        if not tiers:
            return deadline_s_for(2 * deadline_s + SECOND_LOOK_S, self._config.batch_commands_max)
        return deadline_s + max(tier.bound_s() for tier in tiers)

    def p99_ms(self, window_s: float = 5.0) -> float | None:
        """Return the slowest node's 99th percentile in ms of round trips in the last `window_s`; None without any."""
        node_p99s_ms = [node_p99_ms for tier in self.nodes.tiers if (node_p99_ms := tier.p99_ms(window_s)) is not None]
        return max(node_p99s_ms, default=None)

    async def connect_ahead(self) -> None:
        """Open a connection to each node before the first read; raises nothing."""
        with suppress(TierUnavailable):
            await self.nodes.ready()
        await asyncio.gather(*[tier.connect_ahead() for tier in self.nodes.tiers])

    async def aclose(self) -> None:
        """Close every connection; pending reads end with TierUnavailable."""
        await self.nodes.aclose()


def open_tier(config: RemoteConfig, keyspace: Keyspace, new_breaker: Callable[[], Breaker]) -> DataPlane:
    """Open the data plane for the URL of L2: for a single server or for a Redis Cluster."""
    if is_cluster(config.url):
        return ClusterTier(config, keyspace, new_breaker)
    return RemoteTier(config, keyspace, new_breaker())


class Nodes:
    """Tiers of a cluster's masters, each with its own connections and breaker, so that a dead node delays no other.

    The slot map is looked up again after any redirection or failure; the slot of a redirection changes at once.
    """

    def __init__(self, config: RemoteConfig, keyspace: Keyspace, new_breaker: Callable[[], Breaker]) -> None:
        self.refreshes = 0
        self._config, self._keyspace, self._new_breaker = config, keyspace, new_breaker
        self._seed_urls = seed_urls(config.url)
        self._tier_by_address: dict[str, RemoteTier] = {}
        self._tier_by_slot: list[RemoteTier | None] = [None] * SLOT_COUNT
        self._unlisted_addresses: set[str] = set()
        self._refresh_task: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._retired_stats = DataPlaneStats()

    @property
    def tiers(self) -> list[RemoteTier]:
        """Tiers of all known nodes."""
        return list(self._tier_by_address.values())

    @property
    def stats(self) -> DataPlaneStats:
        """Sum of the stats of all nodes, former nodes included, so that counters never fall."""
        return sum((tier.stats for tier in self._tier_by_address.values()), self._retired_stats)

    def tier_of_slot(self, slot: int) -> RemoteTier | None:
        """Return the tier of the node that serves a slot, None if it is not known."""
        return self._tier_by_slot[slot]

    def tier_at(self, address: str) -> RemoteTier:
        """Return the tier of the node at "host:port", which connects at first use."""
        tier = self._tier_by_address.get(address)
        if tier is None:
            tier = self._tier_by_address[address] = self._open_tier(node_url(self._seed_urls[0], address))
        return tier

    def learn(self, slot: int, address: str) -> None:
        """Record a redirection: the node at `address` serves this slot; schedule a lookup of the map."""
        self._tier_by_slot[slot] = self.tier_at(address)
        self.refresh_soon()

    def refresh_soon(self) -> None:
        """Look up the map in the background, unless that was done within the last second."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._refreshed_at >= REFRESH_PAUSE_S and not self._is_closed:
            self._start_refresh()

    async def ready(self) -> None:
        """Wait until there is a map; raise TierUnavailable if no node returns one."""
        if not self._tier_by_address:
            await self.refresh()

    async def call_owner(self, slot: int, call_tier: Callable[[RemoteTier], Awaitable[T]]) -> T:
        """Return the result of a call on the node that serves a slot, for callers without a deadline.

        Raises TierUnavailable. A redirected call is repeated once after a lookup of the map.
        """
        await self.ready()
        try:
            return await call_tier(self._tier_serving(slot))
        except TierUnavailable as error:
            if not isinstance(error.__cause__, MovedError):
                self.refresh_soon()
                raise
        await self.refresh()
        return await call_tier(self._tier_serving(slot))

    async def refresh(self) -> None:
        """Look up the slot map now; concurrent calls share one lookup.

        Raises TierUnavailable if no node returns a map.
        """
        if self._is_closed:
            raise TierUnavailable("this client was closed", reason="connection")
        await asyncio.shield(self._start_refresh())

    async def aclose(self) -> None:
        """Close every tier."""
        self._is_closed = True
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)
        await asyncio.gather(*(tier.aclose() for tier in self._tier_by_address.values()), *self._closing_tasks)

    def _tier_serving(self, slot: int) -> RemoteTier:
        tier = self._tier_by_slot[slot]
        if tier is None:
            self.refresh_soon()
            raise TierUnavailable(f"no node of the Redis Cluster serves slot {slot}", reason="connection")
        return tier

    def _start_refresh(self) -> "asyncio.Task[None]":
        if self._refresh_task is None:
            loop = asyncio.get_running_loop()
            self._refreshed_at = loop.time()
            self._refresh_task = loop.create_task(self._refresh_map())
            self._refresh_task.add_done_callback(self._finish_refresh)
        return self._refresh_task

    def _finish_refresh(self, task: "asyncio.Task[None]") -> None:
        self._refresh_task = None
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved: the awaiting callers receive it

    async def _refresh_map(self) -> None:
        """Adopt the first complete map, else the one with most slots: a node that restarted empty knows only itself."""
        fullest_owners: SlotOwners = {}
        # Ask nodes with an open breaker last: each may cost a time-out.
        shuffled_tiers = sorted(self._tier_by_address.items(), key=lambda _: random.random())
        for address, tier in sorted(
            shuffled_tiers, key=lambda address_and_tier: address_and_tier[1].breaker.state != "closed"
        ):
            fullest_owners = max(fullest_owners, await self._fetch_owners(tier, address), key=len)
            if len(fullest_owners) == SLOT_COUNT:
                break
        for url in self._seed_urls if len(fullest_owners) < SLOT_COUNT else ():
            if address_of(url) in self._tier_by_address:
                continue
            seed = self._open_tier(url)
            try:
                fullest_owners = max(fullest_owners, await self._fetch_owners(seed, address_of(url)), key=len)
            finally:
                await seed.aclose()
            if len(fullest_owners) == SLOT_COUNT:
                break
        if not fullest_owners:
            raise TierUnavailable(_NO_SLOT_MAP_MESSAGE, reason="connection")
        self.refreshes += 1
        self._adopt(fullest_owners)

    async def _fetch_owners(self, tier: RemoteTier, address: str) -> SlotOwners:
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                return owners_from_reply(await tier.control.execute("CLUSTER SLOTS"), address)
        except (TierUnavailable, TimeoutError, ValueError, TypeError):
            return {}

    def _adopt(self, owners: SlotOwners) -> None:
        tier_by_address = {address: self.tier_at(address) for address in set(owners.values())}
        self._tier_by_slot = [
            None if address is None else tier_by_address[address] for address in map(owners.get, range(SLOT_COUNT))
        ]
        absent_addresses = set(self._tier_by_address) - set(tier_by_address)
        # Close a node's tier only if two maps in a row lack it: it may still owe replies, and a node that is taking
        # over its first slot is in no map yet.
        for address in absent_addresses & self._unlisted_addresses:
            self._retire(self._tier_by_address.pop(address))
        self._unlisted_addresses = absent_addresses & set(self._tier_by_address)

    def _retire(self, tier: RemoteTier) -> None:
        self._retired_stats += replace(tier.stats, breaker_state="closed")
        task = asyncio.get_running_loop().create_task(tier.aclose())
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    def _open_tier(self, url: str) -> RemoteTier:
        return RemoteTier(replace(self._config, url=url), self._keyspace, self._new_breaker())


class ClusterControl(ControlPlane):
    """Control plane on the node that serves the control keys, which follows them when they move."""

    def __init__(self, keyspace: Keyspace, nodes: Nodes) -> None:
        self.keyspace = keyspace
        self._nodes = nodes
        self._home_slot = key_slot(keyspace.live.encode())
        self._subscription_count = 0

    async def execute(self, *command: CommandArgument) -> Any:
        """Return the reply to a command from the node of the control keys."""
        return await self._nodes.call_owner(self._home_slot, lambda tier: tier.control.execute(*command))

    async def execute_all(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Any]:
        """Return the replies to all commands, whose keys must be in the control keys' slot; raise the first error."""
        return await self._nodes.call_owner(self._home_slot, lambda tier: tier.control.execute_all(commands))

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        """Return every node's reply; for a node without one a TierUnavailable, which is returned, not raised."""
        await self._nodes.ready()
        calls = (tier.control.execute(*command) for tier in self._nodes.tiers)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, TierUnavailable):
                raise reply
        return replies

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yield a channel's messages from one node, to which the cluster relays those of all.

        After an error use the next node.
        """
        await self._nodes.ready()
        tiers = self._nodes.tiers
        tier = tiers[self._subscription_count % len(tiers)]
        self._subscription_count += 1
        async with contextlib.aclosing(tier.control.subscribe(channel)) as messages:
            async for message in messages:
                yield message


class CommandSlots:
    """Slots of the keys of commands; caches the slots of a table's pages."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._page_slots_by_table: dict[tuple[str, str], PageSlots] = {}

    def slots_of_commands(self, commands: Sequence[Command]) -> Iterable[int]:
        """Return the slots of the commands' keys, in order."""
        if isinstance(commands, PageReads):
            slot_of = self._page_slots(commands.generation, commands.table).__getitem__
            return map(slot_of, commands.page_numbers.tolist())
        return map(self.slot_of_command, commands)

    def slot_of_command(self, command: Command) -> int:
        """Return the slot of one command's key."""
        if isinstance(command, PageRead):
            return self._page_slots(command.generation, command.table)[command.page_number]
        if isinstance(command, OverlayRead | OverlayWrite):
            overlay_key = self._keyspace.overlay(command.generation, command.table, command.hash_hex)
            return key_slot(overlay_key.encode())
        if isinstance(command, AskingCommand):
            return self.slot_of_command(command.command)
        return key_slot(command.lease_key.encode())

    def _page_slots(self, generation: str, table: str) -> PageSlots:
        page_slots = self._page_slots_by_table.get((generation, table))
        if page_slots is None:
            if len(self._page_slots_by_table) >= _CACHED_TABLES_MAX:
                self._page_slots_by_table.clear()
            page_slots = self._page_slots_by_table[generation, table] = PageSlots(self._keyspace, generation, table)
        return page_slots


class Scatter:
    """Commands distributed over nodes; ends when each node has answered or reached its own deadline.

    Redirected commands are sent on, at most `REDIRECTS_MAX` times and within `redirect_window_s` of the first
    redirection.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        convert_answers: Keep,
        nodes: Nodes,
        slots: CommandSlots,
        redirect_window_s: float,
    ) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands, self._nodes, self._slots, self._redirect_window_s = (commands, nodes, slots, redirect_window_s)
        self._caller_part = PipelinePart(commands, b"", 0, self.result, convert_answers)
        self._answers: list[L2Result] = []
        self._indexes_and_frames: list[tuple[Sequence[int], Frames]] = []
        self._pending_part_count = 0
        self._window_timer: asyncio.TimerHandle | None = None

    def send(self) -> "asyncio.Future[Any]":
        """Send each node its commands; return a future of `keep` applied to the answers, without awaiting."""
        indexes_by_tier: dict[RemoteTier | None, list[int]] = {}
        tier_of_slot = self._nodes.tier_of_slot
        for index, slot in enumerate(self._slots.slots_of_commands(self._commands)):
            indexes_by_tier.setdefault(tier_of_slot(slot), []).append(index)
        if len(indexes_by_tier) == 1:
            (tier,) = indexes_by_tier
            if tier is not None:
                tier.submit(self._commands, self._take_all_answers)
                return self.result
        self._expect(len(indexes_by_tier))
        for tier, indexes in indexes_by_tier.items():
            if tier is None:
                self._fail_unserved(indexes)
            else:
                tier.submit(_select_commands(self._commands, indexes), partial(self._take_answers, indexes, 0))
        return self.result

    def _expect(self, part_count: int) -> None:
        unavailable = TierUnavailable("Redis did not answer in time", reason="timeout")
        self._answers = [unavailable] * len(self._commands)  # also for answers missing at the end of the window
        self._pending_part_count = part_count

    def _take_all_answers(self, answers: Sequence[L2Result]) -> None:
        if isinstance(answers, Frames):  # unchanged, for callers that read columns
            self._caller_part.land(answers)
            return
        self._expect(1)
        self._take_answers(range(len(answers)), 0, answers)

    def _fail_unserved(self, command_indexes: Sequence[int]) -> None:
        self._nodes.refresh_soon()
        unavailable = TierUnavailable("no node of the Redis Cluster serves this slot", reason="connection")
        self._take_answers(command_indexes, REDIRECTS_MAX, [unavailable] * len(command_indexes))

    def _take_answers(self, command_indexes: Sequence[int], redirect_count: int, answers: Sequence[L2Result]) -> None:
        if self.result.done():  # by a cancelled caller or the end of the window
            return
        try:
            self._merge_results(command_indexes, redirect_count, answers)
        except Exception as error:  # whatever a node sent, the waiting caller must get a result
            log.exception("the answer of a node cannot be read")
            strange_answer_error = TierUnavailable(f"an unreadable answer: {error!r}", reason="connection")
            self._caller_part.land([strange_answer_error] * len(self._commands))

    def _merge_results(self, command_indexes: Sequence[int], redirect_count: int, answers: Sequence[L2Result]) -> None:
        self._pending_part_count -= 1
        if isinstance(answers, Frames):
            self._indexes_and_frames.append((command_indexes, answers))
        else:
            unavailable_indexes: list[int] = []
            for index, answer in zip(command_indexes, answers, strict=True):
                self._answers[index] = answer
                if isinstance(answer, TierUnavailable):
                    unavailable_indexes.append(index)
            if unavailable_indexes:
                self._follow_redirections(unavailable_indexes, redirect_count)
        if not self._pending_part_count:
            self._end()

    def _follow_redirections(self, command_indexes: Sequence[int], redirect_count: int) -> None:
        """Send redirected commands again.

        The keys of a failed node are misses, and a lookup of the map is scheduled.
        """
        indexes_by_target: dict[tuple[str, bool], list[int]] = {}
        for index in command_indexes:
            answer = self._answers[index]
            if not isinstance(answer, Redirected):
                self._nodes.refresh_soon()
            elif redirect_count < REDIRECTS_MAX:
                indexes_by_target.setdefault((answer.address, answer.is_ask), []).append(index)
                if not answer.is_ask:
                    self._nodes.learn(answer.slot, answer.address)
        self._pending_part_count += len(indexes_by_target)
        if indexes_by_target and self._window_timer is None:
            loop = asyncio.get_running_loop()
            self._window_timer = loop.call_later(self._redirect_window_s, self._end)
        for (address, is_ask), redirected_indexes in indexes_by_target.items():
            commands = [self._commands[index] for index in redirected_indexes]
            self._nodes.tier_at(address).submit(
                [AskingCommand(command) for command in commands] if is_ask else commands,
                partial(self._take_answers, redirected_indexes, redirect_count + 1),
            )

    def _end(self) -> None:
        """End with the answers so far; pending commands count as timed out or as redirected too often."""
        if self._window_timer is not None:
            self._window_timer.cancel()
        if sum(len(indexes) for indexes, _ in self._indexes_and_frames) == len(self._commands):
            self._caller_part.land(Frames.merge(self._indexes_and_frames))  # for callers that read columns
            return
        for indexes, frames in self._indexes_and_frames:
            for index, payload in zip(indexes, frames.payloads(), strict=True):
                self._answers[index] = payload
        self._caller_part.land(self._answers)


def _select_commands(commands: Sequence[Command], command_indexes: Sequence[int]) -> Sequence[Command]:
    if isinstance(commands, PageReads):
        page_numbers, offsets = commands.page_numbers.take(command_indexes), commands.page_offsets.take(command_indexes)
        return PageReads(commands.generation, commands.table, page_numbers, offsets, commands.length_bytes)
    return [commands[index] for index in command_indexes]
