"""L2: records in Redis. The only async Redis code, and the only place where its errors are translated."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import hiredis
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import NoPermissionError, RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from cache.control.hot_keys import COLD, MEMBERS_MAX, READ_AT_ONCE, REPORT, Name, Report, hottest
from cache.errors import TierUnavailable
from cache.format.keys import Keyspace
from cache.l2.circuit_breaker import Breaker
from cache.l2.commands import (
    Answer,
    Command,
    OverlayWrite,
    Packer,
    PageRead,
    PageReads,
    Read,
    unpack,
)
from cache.l2.connection import Batch, Replies
from cache.l2.lease_commands import Lease
from cache.l2.pipeline import Keep, Part, as_it_is
from cache.l2.pool import SECOND_LOOK_S, Lane, deadline_for
from cache.l2.redirects import is_redirect
from cache.l2.replies import Frames

log = logging.getLogger(__name__)

PROTOCOL = 2
"""RESP version, explicit as redis-py's default has changed. Reads need no push messages; subscribing works in both."""

_CONTROL_MAX = 16
"""Connections beside the wires: a dozen steps of the background may meet, and pages are read on them, too."""

_LANDINGS = 1_024
"""Round trips remembered: what the slowest of the last seconds took is told with every heartbeat."""

# Allowed at full memory: a replica that cannot say that it lives looks dead, and what it holds would be retired. The
# new payload before the old one goes: at no moment may what is held look as if it were not.
_BEAT = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
if ARGV[3] and ARGV[3] ~= ARGV[2] then redis.call('ZREM', KEYS[1], ARGV[3]) end
return 1
"""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings: `url` may carry TLS, ACL user, database; a read lands within `deadline_s`, connecting may be slower."""

    url: str
    deadline_s: float = 0.02
    connect_timeout_s: float = 1.0
    control_timeout_s: float = 1.0
    wires_max: int = 2
    commands_in_flight_max: int = 65_536
    batch_commands_max: int = 1_024


T = TypeVar("T")


class RemoteTier:
    """A pipeline for the reads and writes of one event-loop turn together, on wires that belong to no caller.

    Nothing is retried. Use it in one event loop only.
    """

    def __init__(
        self,
        config: RemoteConfig,
        keyspace: Keyspace,
        breaker: Breaker | None = None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.keyspace = keyspace
        self.breaker = breaker or Breaker()
        self.batches = 0
        self.commands = 0
        self.shed = 0
        pool = ConnectionPool.from_url(
            config.url,
            protocol=PROTOCOL,
            socket_connect_timeout=config.connect_timeout_s,
            socket_timeout=config.control_timeout_s,
            max_connections=_CONTROL_MAX,
        )
        self.lane = Lane(pool, config.deadline_s, config.wires_max)
        self._control: Redis = Redis(connection_pool=pool)
        self._pool = pool
        self._turn: list[Part] = []
        self._in_flight = 0
        self._timer = timer
        self._landings: deque[tuple[float, float]] = deque(maxlen=_LANDINGS)
        self._counted: TierUnavailable | None = None
        self._packer = Packer(keyspace)
        self._payloads: dict[str, bytes] = {}

    async def read(self, reads: Sequence[Read], timeout_s: float | None = None) -> list[Answer]:
        """Answers, one per read: the record or overlay, None where there is none, else why it is not known.

        `timeout_s` is the caller's own: it gives up alone, the wire stays in use.
        """
        if not reads:
            return []
        if timeout_s is None:  # the tier's own, which grows with what travels along
            return cast(list[Answer], await self._submit(reads))
        try:
            async with asyncio.timeout(timeout_s):
                return cast(list[Answer], await self._submit(reads))
        except TimeoutError:
            late = TierUnavailable(f"no reply within {timeout_s} s", reason="timeout")
            return [late] * len(reads)

    def submit(
        self, reads: Sequence[Command], keep: Callable[[Sequence[Answer]], T]
    ) -> asyncio.Future[T]:
        """A future of what `keep` makes of the answers to at least one read, the moment they land; needs no task."""
        return cast(asyncio.Future[T], self._submit(reads, keep))

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """A future of Redis' answer to `command`, which travels with the reads of this turn."""
        return cast(
            asyncio.Future[bytes | TierUnavailable | None],
            self._submit((command,), lambda answers: answers[0]),
        )

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Stores each overlay with its expiry; returns None for each that was stored, else why it was not."""
        answers: list[Answer] = await self._submit(writes) if writes else []
        return [each if isinstance(each, TierUnavailable) else None for each in answers]

    def _submit(self, commands: Sequence[Command], keep: Keep = as_it_is) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        answers: asyncio.Future[Any] = loop.create_future()
        if self._in_flight + len(commands) > self.config.commands_in_flight_max:
            self.shed += len(commands)
            full = TierUnavailable(f"{self._in_flight} commands are under way", reason="timeout")
            answers.set_result(keep([full] * len(commands)))
            return answers
        length = 0
        if type(commands) is PageReads:
            packed, count, length = self._packer.pages(commands), len(commands), commands.length
        else:
            packed, count = self._packer.pack(commands)
        self._in_flight += count
        if not self._turn:
            # Runs after every callback that is ready now, so whoever reads in this turn travels along.
            loop.call_soon(self._flush)
        self._turn.append(Part(commands, packed, count, answers, keep, length))
        return answers

    def _flush(self) -> None:
        turn, self._turn = self._turn, []
        parts: list[Part] = []
        count = 0
        # What is answered at one length lies together: such replies need no parser.
        for part in sorted(turn, key=_length_of) if len(turn) > 1 else turn:
            if parts and (
                count + part.count > self.config.batch_commands_max
                or part.length != parts[0].length
            ):
                self._send(parts, count)
                parts, count = [], 0
            parts.append(part)
            count += part.count
        self._send(parts, count)

    def _send(self, parts: list[Part], count: int) -> None:
        if not self.breaker.allow():
            self._answer_all(parts, TierUnavailable("Redis is resting", reason="breaker_open"))
            return
        self.batches += 1
        self.commands += count
        packed = b"".join([part.packed for part in parts])
        sent_at = self._timer()
        self.lane.send(
            Batch(
                packed,
                count,
                lambda outcome: self._landed(parts, outcome, sent_at),
                parts[0].length,
            )
        )

    def _landed(
        self, parts: list[Part], outcome: Replies | TierUnavailable, sent_at: float
    ) -> None:
        now = self._timer()
        self._landings.append((now, now - sent_at))
        if isinstance(outcome, TierUnavailable):
            # All that was under way on a wire fails as one: it is the stall that counts, not how much waited for it.
            if outcome is not self._counted:
                self._counted = outcome
                self.breaker.failure()
            self._answer_all(parts, outcome)
            return
        if all(
            isinstance(reply, hiredis.ReplyError) and not is_redirect(reply) for reply in outcome
        ):
            self.breaker.failure()  # loading, out of memory, no permission: there, but no use
        else:
            self.breaker.success()
        start = 0
        for part in parts:
            replies = outcome
            if part.count != len(outcome):
                replies = (
                    outcome.part(start, part.count)
                    if type(outcome) is Frames
                    else outcome[start : start + part.count]
                )
            start += part.count
            self._in_flight -= part.count
            part.land(_unpacked(part.commands, replies))

    def _answer_all(self, parts: list[Part], why: TierUnavailable) -> None:
        for part in parts:
            self._in_flight -= part.count
            part.land([why] * len(part.commands))

    def bound_s(self) -> float:
        """Bound in seconds for a read that is sent now, whatever travels along and lies before it."""
        commands = self._in_flight + self.config.batch_commands_max
        return deadline_for(self.config.deadline_s, commands) + deadline_for(
            SECOND_LOOK_S, commands
        )

    def p99_ms(self, within_s: float = 5.0) -> float | None:
        """99th percentile in ms of round trips of the last `within_s`, failed ones included; None without any."""
        since = self._timer() - within_s
        seconds = sorted(took for at, took in self._landings if at >= since)
        return 1000 * seconds[(99 * len(seconds)) // 100] if seconds else None

    async def ping(self) -> None:
        """Raises TierUnavailable unless Redis answers."""
        await self._ask("PING")

    async def watch(self) -> tuple[bytes | None, bytes | None]:
        """The live pointer's JSON and the staging note's, as of one moment; None for what is not there."""
        pointer, note = await self._ask("MGET", self.keyspace.live, self.keyspace.next)
        return cast(bytes | None, pointer), cast(bytes | None, note)

    async def time(self) -> float:
        """Redis' own clock, Unix seconds: replicas and publishers may run on hosts whose clocks differ."""
        seconds, microseconds = await self._ask("TIME")
        return float(seconds) + float(microseconds) / 1e6

    async def heartbeat(self, replica_id: str, payload: bytes, at: float) -> None:
        """Registers what this replica holds: a member of the sorted set of replicas, scored `at` (Redis' time).

        It takes the place of the replica's last payload, in one step, also while Redis is at maxmemory.
        """
        before = self._payloads.get(replica_id)
        old = () if before is None else (before,)
        try:
            await self._ask("EVAL", _BEAT, 1, self.keyspace.replicas, at, payload, *old)
        except TierUnavailable as error:
            if not isinstance(error.__cause__, NoPermissionError):
                raise
            # The user's rights are those of an earlier version: then as before, which needs free memory.
            await self._ask("ZADD", self.keyspace.replicas, at, payload)
            if before not in (None, payload):
                await self._ask("ZREM", self.keyspace.replicas, before)
        self._payloads[replica_id] = payload

    async def sign_off(self, replica_id: str) -> None:
        """Takes a replica's last payload away; Redis removes at maxmemory too."""
        if (payload := self._payloads.pop(replica_id, None)) is not None:
            await self._ask("ZREM", self.keyspace.replicas, payload)

    async def slots(self) -> Any:
        """Slot map of a Redis Cluster as this node knows it: the reply to `CLUSTER SLOTS`."""
        return await self._ask("CLUSTER", "SLOTS")

    async def report_hot(self, report: Report) -> None:
        """Adds to the sketch of recent requests what this replica was asked for."""
        name = self.keyspace.cold if report.window is COLD else self.keyspace.hot
        keys = name(report.hour), name(report.hour - 1)
        await self._ask("EVAL", REPORT, len(keys), *keys, *report.arguments())

    async def hot(self, hour: int) -> list[Name]:
        """Names that all replicas were asked for most in this hour and the last, hottest first."""
        return hottest([await self._hot(self.keyspace.hot(each)) for each in (hour, hour - 1)])

    async def cold(self, day: int) -> list[Name]:
        """Names that all replicas were asked for this day and the last and no generation knew, most asked first."""
        return hottest([await self._hot(self.keyspace.cold(each)) for each in (day, day - 1)])

    async def _hot(self, key: str) -> list[bytes]:
        found: list[bytes] = []
        for start in range(0, MEMBERS_MAX, READ_AT_ONCE):
            last = start + READ_AT_ONCE - 1
            found += (piece := await self._ask("ZREVRANGE", key, start, last, "WITHSCORES"))
            if len(piece) < 2 * READ_AT_ONCE:
                break
        return found

    async def ask(self, *command: str | bytes | float) -> Any:
        """The reply to a command on a key beside the pointer, at leisure; TierUnavailable when there is none."""
        return await self._ask(*command)

    async def page(self, read: PageRead) -> bytes | None:
        """A page or a part of it, None where there is none; at leisure, so on no wire that readers wait for."""
        key = self.keyspace.page(read.generation, read.table, read.page)
        last = read.offset + read.length - 1
        found = cast(bytes, await self._ask("GETRANGE", key, read.offset, last))
        return found if len(found) == read.length else None

    async def eviction_policy(self) -> str:
        """`maxmemory-policy` of the server; `allkeys-*` would evict published pages."""
        info = await self._ask("INFO", "memory")
        return str(cast(dict[str, object], info).get("maxmemory_policy", ""))

    async def ask_all(self, commands: Sequence[tuple[str | bytes | float, ...]]) -> list[Any]:
        """Replies to all commands, in one round trip of a connection for control; the first refusal is raised."""
        try:
            async with self._control.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def infos(self) -> list[dict[str, Any]]:
        """`INFO` of every server: here one."""
        return [cast(dict[str, Any], await self._ask("INFO"))]

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Messages of the keyspace's channel; ends with TierUnavailable when the connection does."""
        async with self._control.pubsub(ignore_subscribe_messages=True) as subscription:
            try:
                await subscription.subscribe(channel or self.keyspace.channel)
                async for message in subscription.listen():
                    yield message["data"]
            except (RedisError, OSError) as error:
                raise _unavailable(error) from error

    async def _ask(self, *command: str | bytes | float) -> Any:
        try:
            return await self._control.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def aclose(self) -> None:
        """Closes every connection; reads under way end as unavailable."""
        await self.lane.aclose()
        await self._control.aclose()
        await self._pool.disconnect()


def _unpacked(commands: Sequence[Command], replies: Sequence[Any]) -> Sequence[Answer]:
    try:
        return unpack(commands, replies)
    except (
        Exception
    ) as error:  # one part's strange reply must not leave the others of its batch without an end
        log.exception("a reply of Redis cannot be read")
        strange = TierUnavailable(f"a reply that cannot be read: {error!r}", reason="connection")
        return [strange] * len(commands)


def _length_of(part: Part) -> int:
    return part.length


def _unavailable(error: Exception) -> TierUnavailable:
    reason = "timeout" if isinstance(error, RedisTimeout | TimeoutError) else "connection"
    return TierUnavailable(f"Redis: {error}", reason=reason)
