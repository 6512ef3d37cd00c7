"""L2 on one Redis server: the reads and writes of one event-loop iteration as one pipeline."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, TypeVar, cast

import hiredis
from redis.asyncio import ConnectionPool

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import (
    Command,
    Frames,
    L2Result,
    Lease,
    OverlayWrite,
    Packer,
    PageRead,
    PageReads,
    Read,
    deadline_s_for,
    unpack,
)
from cache.l2.control_plane import ServerControl
from cache.l2.data_plane import Breaker, DataPlaneStats
from cache.l2.errors import is_redirect
from cache.l2.pool import SECOND_LOOK_S, Pipeline, PipelinePool, Replies
from cache.l2.resp import ASYNC_BOUNDED_POOL_SETTINGS
from cache.l2.sentinel import async_primary_pool, is_sentinel

log = logging.getLogger(__name__)

RESP_VERSION = 2
"""RESP version, explicit because redis-py's default has changed. Reads need no push messages; subscribing works with
both versions."""

_CONTROL_CONNECTIONS_MAX = 16
"""Largest number of connections for everything but readers' pipelines: about a dozen concurrent background commands,
and page reads."""

_REMEMBERED_ROUND_TRIPS = 1_024
"""Number of round trips kept: every heartbeat reports the p99 of the last seconds."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings: `url` may include TLS, ACL user, database.

    A read ends within `deadline_s`, connecting may take longer.
    """

    url: str
    deadline_s: float = 0.02
    connect_timeout_s: float = 1.0
    control_timeout_s: float = 1.0
    connections_max: int = 2
    commands_in_flight_max: int = 65_536
    batch_commands_max: int = 1_024


T = TypeVar("T")
Keep = Callable[[Sequence[L2Result]], Any]


@dataclass(slots=True, eq=False)
class PipelinePart:
    """Commands of one caller in one event-loop iteration, and the future of the caller's `convert_answers`."""

    commands: Sequence[Command]
    packed_commands: bytes
    reply_count: int
    result_future: asyncio.Future[Any]
    convert_answers: Keep
    reply_payload_bytes: int = 0
    """Payload size in bytes that every reply has if no record is missing; 0 if the replies' sizes differ."""

    def land(self, answers: Sequence[L2Result]) -> None:
        """Set the future to the converted answers or the converter's exception, unless the caller has cancelled it."""
        # The caller has cancelled its future: drop the replies.
        if self.result_future.done():
            return
        try:
            future_result = self.convert_answers(answers)
        except Exception as error:  # fails only this caller, not the others of this loop iteration
            self.result_future.set_exception(error)
        else:
            self.result_future.set_result(future_result)


class RemoteTier:
    """Data plane of one server: one pipeline per event-loop iteration, on connections shared by all callers.

    Nothing is retried. Use it in one event loop only.
    """

    def __init__(self, config: RemoteConfig, keyspace: Keyspace, breaker: Breaker | None = None) -> None:
        self.config = config
        self.breaker = breaker or Breaker()
        self._batch_count = self._command_count = self._shed_command_count = 0
        open_pool = async_primary_pool if is_sentinel(config.url) else ConnectionPool.from_url
        pool = open_pool(
            config.url,
            protocol=RESP_VERSION,
            socket_connect_timeout=config.connect_timeout_s,
            socket_timeout=config.control_timeout_s,
            max_connections=_CONTROL_CONNECTIONS_MAX,
            **ASYNC_BOUNDED_POOL_SETTINGS,
        )
        self.pool = PipelinePool(pool, config.deadline_s, config.connections_max)
        self.control = ServerControl(keyspace, pool, self.pool.renew)
        self._queued_parts: list[PipelinePart] = []
        self._commands_in_flight = 0
        self._round_trips: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED_ROUND_TRIPS)
        self._counted_failure: TierUnavailable | None = None
        self._packer = Packer(keyspace)

    @property
    def stats(self) -> DataPlaneStats:
        """Counts since the start, and the breaker's current state."""
        return DataPlaneStats(
            self._batch_count, self._command_count, self._shed_command_count, self.breaker.opened, self.breaker.state
        )

    def submit(
        self, commands: Sequence[Command], convert_answers: Callable[[Sequence[L2Result]], T]
    ) -> asyncio.Future[T]:
        """Send one command or more; return a future of `convert_answers` applied to the answers when they arrive."""
        loop = asyncio.get_running_loop()
        answers_future: asyncio.Future[T] = loop.create_future()
        if self._commands_in_flight + len(commands) > self.config.commands_in_flight_max:
            self._shed_command_count += len(commands)
            shed_error = TierUnavailable(f"{self._commands_in_flight} commands are pending", reason="timeout")
            answers_future.set_result(convert_answers([shed_error] * len(commands)))
            return answers_future
        payload_bytes = 0
        if type(commands) is PageReads:
            packed_commands, reply_count, payload_bytes = (
                self._packer.pack_page_reads(commands),
                len(commands),
                commands.length_bytes,
            )
        else:
            packed_commands, reply_count = self._packer.pack(commands)
        self._commands_in_flight += reply_count
        if not self._queued_parts:
            # Runs after all callbacks that are ready now, so that reads of the same loop iteration share the pipeline.
            loop.call_soon(self._flush)
        self._queued_parts.append(
            PipelinePart(commands, packed_commands, reply_count, answers_future, convert_answers, payload_bytes)
        )
        return answers_future

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """Send a lease command with the reads of this loop iteration; return a future of the answer."""
        return self.submit((command,), itemgetter(0))

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Store each overlay with its expiry; return None for each success, else the error."""
        answers = await self.submit(writes, list) if writes else []
        return [answer if isinstance(answer, TierUnavailable) else None for answer in answers]

    def _flush(self) -> None:
        queued_parts, self._queued_parts = self._queued_parts, []
        parts: list[PipelinePart] = []
        reply_count = 0
        # Group replies of equal length: they need no parser.
        for part in (
            sorted(queued_parts, key=attrgetter("reply_payload_bytes")) if len(queued_parts) > 1 else queued_parts
        ):
            if parts and (
                reply_count + part.reply_count > self.config.batch_commands_max
                or part.reply_payload_bytes != parts[0].reply_payload_bytes
            ):
                self._send(parts, reply_count)
                parts, reply_count = [], 0
            parts.append(part)
            reply_count += part.reply_count
        self._send(parts, reply_count)

    def _send(self, parts: list[PipelinePart], reply_count: int) -> None:
        if not self.breaker.allow_call():
            self._answer_all(parts, TierUnavailable("the circuit breaker is open", reason="breaker_open"))
            return
        self._batch_count += 1
        self._command_count += reply_count
        packed_commands = b"".join([part.packed_commands for part in parts])
        sent_at = time.monotonic()
        self.pool.send(
            Pipeline(
                packed_commands,
                reply_count,
                lambda outcome: self._take_outcome(parts, outcome, sent_at),
                parts[0].reply_payload_bytes,
            )
        )

    def _take_outcome(self, parts: list[PipelinePart], outcome: Replies | TierUnavailable, sent_at: float) -> None:
        landed_at = time.monotonic()
        self._round_trips.append((landed_at, landed_at - sent_at))
        if isinstance(outcome, TierUnavailable):
            # All pending pipelines of a connection fail together; count one failure, however many there were.
            if outcome is not self._counted_failure:
                self._counted_failure = outcome
                self.breaker.note_failure()
            self._answer_all(parts, outcome)
            return
        if all(isinstance(reply, hiredis.ReplyError) and not is_redirect(reply) for reply in outcome):
            # The server answers but cannot serve (loading, no permission). For writes alone, such as out of memory,
            # this says nothing about reads.
            has_reads = any(isinstance(command, Read) for part in parts for command in part.commands)
            self.breaker.note_failure() if has_reads else self.breaker.note_success()
        else:
            self.breaker.note_success()
        first_reply_index = 0
        for part in parts:
            replies = outcome
            if part.reply_count != len(outcome):
                replies = (
                    outcome.select_range(first_reply_index, part.reply_count)
                    if type(outcome) is Frames
                    else outcome[first_reply_index : first_reply_index + part.reply_count]
                )
            first_reply_index += part.reply_count
            self._commands_in_flight -= part.reply_count
            part.land(_unpack_or_fail(part.commands, replies))

    def _answer_all(self, parts: list[PipelinePart], error: TierUnavailable) -> None:
        for part in parts:
            self._commands_in_flight -= part.reply_count
            part.land([error] * len(part.commands))

    def bound_s(self) -> float:
        """Return the bound in seconds for a read sent now, including the commands sent with it and before it."""
        command_count = self._commands_in_flight + self.config.batch_commands_max
        return deadline_s_for(self.config.deadline_s + SECOND_LOOK_S, command_count)

    def p99_ms(self, window_s: float = 5.0) -> float | None:
        """Return the 99th percentile of round trips in ms, failures included, in the last `window_s`.

        Returns None without any.
        """
        window_start_s = time.monotonic() - window_s
        round_trip_times_s = sorted(
            elapsed_s for landed_at, elapsed_s in self._round_trips if landed_at >= window_start_s
        )
        return 1000 * round_trip_times_s[(99 * len(round_trip_times_s)) // 100] if round_trip_times_s else None

    async def page(self, read: PageRead) -> bytes | None:
        """Read a page or a part of it, on a connection without readers' commands; None if there is none."""
        key = self.control.keyspace.page(read.generation, read.table, read.page_number)
        last_byte = read.page_offset + read.length_bytes - 1
        page_part = cast(bytes, await self.control.execute("GETRANGE", key, read.page_offset, last_byte))
        return page_part if len(page_part) == read.length_bytes else None

    async def connect_ahead(self) -> None:
        """Open a connection before the first read; raises nothing."""
        await self.pool.connect_ahead()

    async def aclose(self) -> None:
        """Close every connection; pending reads end with TierUnavailable."""
        await self.pool.aclose()
        await self.control.aclose()


def _unpack_or_fail(commands: Sequence[Command], replies: Sequence[Any]) -> Sequence[L2Result]:
    try:
        return unpack(commands, replies)
    except Exception as error:  # an unreadable reply of one part must not leave the other parts of its batch waiting
        log.exception("cannot read a reply of Redis")
        unreadable_error = TierUnavailable(f"an unreadable reply: {error!r}", reason="connection")
        return [unreadable_error] * len(commands)
