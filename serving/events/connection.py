"""Connections to the Redis of events: one pool, a check of durability as each opens, and translated errors."""

import contextlib
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from cache.config.events import Durability
from cache.errors import ConfigError, LarderError
from cache.events.stream import ACCEPT_SCRIPT, STREAM_FULL_PREFIX
from cache.l2.errors import HANDLER_CLOSED_MESSAGE
from cache.l2.resp import ASYNC_BOUNDED_POOL_SETTINGS, TEXTS_SHAPE, WrongReply, check_replies, checked_reply

CONNECTIONS_MAX: Final = 8
"""Connections of a process: for the acceptor, the inbox, gauges and rejected events."""

CONNECT_TIMEOUT_S: Final = 1.0

REPLY_TIMEOUT_S: Final = 3.0
"""Seconds for a reply: long, since a disk may have to store events first, and no lookup waits for this."""

Persistence = Literal["always", "everysec", "none", "unknown"]
"""Durability of an accepted event: on disk; on disk within a second; in memory only; or unknown."""

CommandSender = Callable[..., Awaitable[Any]]
"""Callable that sends the words of a command and returns its reply; raises redis-py's errors."""

Command = tuple[bytes | str | int | float, ...]
_RANK_BY_PERSISTENCE: Final = {"always": 2, "everysec": 1, "none": 0, "unknown": 0}
_AOF_ENABLED_PATTERN = re.compile(rb"aof_enabled:([01])")
_EVICTION_POLICY_PATTERN: Final = re.compile(rb"maxmemory_policy:(\S+)")
_MEMORY_FIGURE_PATTERN: Final = re.compile(
    rb"^(used_memory|maxmemory|mem_not_counted_for_evict):(\d+)\r?$", re.MULTILINE
)

NEVER_AN_ENTRY_ID: Final = "0-0"
"""Id that no entry of a stream can have: removing it changes nothing, and Redis refuses it as it refuses any write."""


class EventsUnavailable(LarderError):
    """The Redis of events did not answer, or is less durable than demanded; the same events may be sent again."""

    code = "events_unavailable"

    @property
    def public_message(self) -> str:
        """Message for callers, without the host and port of a connection error, which only the log names."""
        match self.__cause__:
            case None:
                return self.message
            case AuthenticationError() | AuthorizationError() | NoPermissionError():
                return "the Redis of events refuses the user of this service or lacks a right of it"
            case BusyLoadingError():
                return "the Redis of events is still loading its data"
            case ResponseError():
                return "the Redis of events answers with an error"
            case _:
                return "the Redis of events cannot be reached"


class WritesRefused(EventsUnavailable):
    """The Redis of events answers, and refuses to write; the message says why, and the remedy."""

    def __init__(self, refusal: "WriteRefusal", reply_text: str) -> None:
        super().__init__(
            f"the Redis of events answers, but refuses to write ({reply_text}): {refusal.remedy}",
            refusal=refusal.redis_error_code,
        )
        self._refusal = refusal

    @property
    def public_message(self) -> str:
        """Message for callers, who cannot mend it."""
        return f"the Redis of events answers, but refuses to write: {self._refusal.refusal_cause}"


class EventsFull(LarderError):
    """The stream is full until it is trimmed, or its Redis is at its maxmemory."""

    code = "events_full"


class WriteRefusal(NamedTuple):
    """Error code with which a Redis that answers refuses to write, why it does, and the remedy."""

    redis_error_code: str
    refusal_cause: str
    remedy: str


_WRITE_REFUSALS: Final = (
    WriteRefusal(
        "MISCONF",
        "it cannot write to its disk",
        "its disk is full or fails; make room there (INFO persistence and its log name the file), and it accepts "
        "events again by itself",
    ),
    WriteRefusal(
        "READONLY",
        "it is a read-only replica",
        "it is a read-only replica; point LARDER_EVENTS_URL at its primary",
    ),
    WriteRefusal(
        "NOREPLICAS",
        "too few replicas follow it",
        "fewer replicas follow it than its min-replicas-to-write demands; start them, or lower min-replicas-to-write",
    ),
)  # fmt: skip


def find_write_refusal(error: Exception) -> WritesRefused | None:
    """Return the refusal if an error of redis-py says that Redis refuses all writes at present, else None."""
    if not isinstance(error, ResponseError):
        return None
    # redis-py removes the code of errors that have a class of their own.
    code = "READONLY" if isinstance(error, ReadOnlyError) else str(error).partition(" ")[0]
    for refusal in _WRITE_REFUSALS:
        if refusal.redis_error_code == code:
            reply_text = str(error).partition(" script: ")[0].rstrip(".")
            return WritesRefused(refusal, reply_text if reply_text.startswith(code) else f"{code} {reply_text}")
    return None


class MemoryUse(NamedTuple):
    """Bytes that count towards Redis' `maxmemory`, and that limit; 0: it has none."""

    used_bytes: int
    limit_bytes: int

    @property
    def is_full(self) -> bool:
        """True if Redis refuses further events."""
        return 0 < self.limit_bytes <= self.used_bytes


class FoundDurability(NamedTuple):
    """Durability found on a server; `waits_for_disk` if each call has to wait for the disk."""

    persistence: Persistence
    waits_for_disk: bool = False

    def suffices(self, demanded_durability: Durability) -> bool:
        """True if the durability is at least the demanded one."""
        return (
            demanded_durability == "any"
            or _RANK_BY_PERSISTENCE[self.persistence] >= _RANK_BY_PERSISTENCE[demanded_durability]
        )


class EventsRedis:
    """Redis with a namespace's events, for one event loop.

    All methods raise EventsUnavailable; commands that need memory raise EventsFull if Redis has no more. No command is
    retried: callers send an event again under its id.
    """

    def __init__(self, redis_url: str, demanded_durability: Durability) -> None:
        self.demanded_durability = demanded_durability
        self.found_durability: FoundDurability | None = None
        """Durability found by the last check; None before the first."""
        try:
            self._pool = ConnectionPool.from_url(
                redis_url,
                protocol=2,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=REPLY_TIMEOUT_S,
                max_connections=CONNECTIONS_MAX,
                retry=Retry(NoBackoff(), 0),
                redis_connect_func=self._open_connection,
                **ASYNC_BOUNDED_POOL_SETTINGS,
            )
        except ValueError as error:
            raise ConfigError(f"events_url cannot be used: {error}", field="events_url") from error
        self._client: Redis = Redis(connection_pool=self._pool)
        self._client.response_callbacks.clear()  # raw replies, without conversions that depend on the protocol version
        check_replies(self._client)

    async def execute(self, *command_parts: Any) -> Any:
        """Return the reply to one command."""
        with _translate_errors():
            return await self._client.execute_command(*command_parts)  # type: ignore[no-untyped-call]

    async def execute_all(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to all commands, in one round trip; raise the first error once all have been sent."""
        with _translate_errors():
            async with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

    async def accept(
        self, script_keys: Sequence[bytes], arguments: Sequence[Any], script: str = ACCEPT_SCRIPT
    ) -> list[bytes]:
        """Return the replies of an acceptance script, once the events are as durable as demanded."""
        evalsha_arguments = (len(script_keys), *script_keys, *arguments)
        with _translate_errors():
            # One connection for check and script: a connection that is opened only now may have reached another server.
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                await self._check_durability_of(connection)
                try:
                    return await self._execute_durably(connection, ("EVALSHA", _script_id(script), *evalsha_arguments))
                except NoScriptError:
                    return await self._execute_durably(connection, ("EVAL", script, *evalsha_arguments))
            except ResponseError as error:
                if not str(error).startswith(STREAM_FULL_PREFIX):
                    raise
                raise EventsFull("the stream of events is full") from error
            finally:
                await self._pool.release(connection)

    async def demand_durability(self) -> None:
        """Check the settings of this Redis; raise EventsUnavailable unless it is as durable as demanded."""
        _check_durability(await self.refresh_durability(), self.demanded_durability)

    async def refresh_durability(self) -> FoundDurability:
        """Return the current durability of this Redis."""
        with _translate_errors():
            durability = await find_durability(self._client.execute_command, self.demanded_durability)
        self.found_durability = durability
        return durability

    async def demand_writes(self, inbox_key: str) -> None:
        """Raise WritesRefused if this Redis answers and refuses to write; changes nothing.

        `inbox_key` is the one stream that the service and the night may both remove entries of.
        """
        with _translate_errors():
            try:
                await self._client.execute_command("XDEL", inbox_key, NEVER_AN_ENTRY_ID)  # type: ignore[no-untyped-call]
            except ResponseError as error:
                if (refused := find_write_refusal(error)) is not None:
                    raise refused from error
                if isinstance(error, WrongReply):
                    raise
                # Any other error (a missing right, a key of another type) says nothing about all writes.

    async def memory_use(self) -> MemoryUse:
        """Return the memory in use and its limit."""
        figures = dict(_MEMORY_FIGURE_PATTERN.findall(await self.execute("INFO", "memory")))
        used_bytes = int(figures.get(b"used_memory", 0)) - int(figures.get(b"mem_not_counted_for_evict", 0))
        return MemoryUse(used_bytes, int(figures.get(b"maxmemory", 0)))

    async def eviction_policy(self) -> str:
        """Return the maxmemory-policy of this Redis, "" if INFO lacks it."""
        policy_match = _EVICTION_POLICY_PATTERN.search(await self.execute("INFO", "memory"))
        return policy_match[1].decode() if policy_match else ""

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose(close_connection_pool=True)

    async def _check_durability_of(self, connection: AbstractConnection) -> None:
        if self.found_durability is None or not self.found_durability.suffices(self.demanded_durability):
            # The server's settings may have been corrected since.
            self.found_durability = await find_durability(partial(_execute_on, connection), self.demanded_durability)
        _check_durability(self.found_durability, self.demanded_durability)

    async def _execute_durably(self, connection: AbstractConnection, command: Command) -> list[bytes]:
        commands = [command]
        if self.found_durability is not None and self.found_durability.waits_for_disk:
            commands.append(("WAITAOF", 1, 0, int(REPLY_TIMEOUT_S * 900)))
        await connection.send_packed_command(connection.pack_commands(commands))
        replies = [await _read_reply(connection) for _ in commands]
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        if len(replies) > 1 and not checked_reply("WAITAOF", replies[1])[0]:
            raise EventsUnavailable("the Redis of events did not write to its disk in time")
        outcome_replies: list[bytes] = checked_reply(str(command[0]), replies[0], TEXTS_SHAPE)
        return outcome_replies

    async def _open_connection(self, connection: AbstractConnection) -> None:
        """Open a connection as redis-py does, and forget the known durability, since the server may be another one."""
        await connection.on_connect()
        self.found_durability = await find_durability(partial(_execute_on, connection), self.demanded_durability)


@cache
def _script_id(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _check_durability(found_durability: FoundDurability, demanded_durability: Durability) -> None:
    if not found_durability.suffices(demanded_durability):
        raise EventsUnavailable(
            f"[events] durability demands {demanded_durability!r}, and the Redis of events has "
            f"{found_durability.persistence!r}: set appendonly yes and appendfsync there, or allow its user CONFIG GET",
            demanded=demanded_durability,
            found=found_durability.persistence,
        )


async def _execute_on(connection: AbstractConnection, *command_parts: str) -> Any:
    await connection.send_command(*command_parts)
    return checked_reply(command_parts[0], await connection.read_response())


async def _read_reply(connection: AbstractConnection) -> Any:
    """Return the next reply, also an error reply, so that later replies are read, too."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        raise EventsFull("the Redis of events is at its maxmemory") from error
    except (RedisError, OSError) as error:
        if (refused := find_write_refusal(error)) is not None:
            raise refused from error
        raise EventsUnavailable(f"the Redis of events: {error or type(error).__name__}") from error
    except RuntimeError as error:
        if not str(error).endswith(HANDLER_CLOSED_MESSAGE):
            raise
        raise EventsUnavailable("the Redis of events closed the connection") from error


async def find_durability(send_command: CommandSender, demanded_durability: Durability) -> FoundDurability:
    """Determine durability from the server's settings or, if those are hidden, from what INFO says of its log.

    If the settings are hidden and more than `any` is demanded, calls use WAITAOF where the server has it.
    """
    try:
        flat_settings = await send_command("CONFIG GET", "*append*")
    except WrongReply:
        raise
    except ResponseError:  # no permission, or the command is renamed
        flat_settings = []
    value_by_setting = dict(zip(flat_settings[::2], flat_settings[1::2], strict=False))
    if b"appendonly" in value_by_setting:
        fsync = value_by_setting.get(b"appendfsync")
        # With this setting a rewrite of the append-only file pauses fsync: half a minute of events may be lost.
        is_fsync_paused = value_by_setting.get(b"no-appendfsync-on-rewrite") == b"yes"
        if value_by_setting[b"appendonly"] != b"yes" or is_fsync_paused or fsync not in (b"always", b"everysec"):
            return FoundDurability("none")
        return FoundDurability("always" if fsync == b"always" else "everysec")
    try:
        aof_match = _AOF_ENABLED_PATTERN.search(await send_command("INFO", "persistence"))
    except WrongReply:
        raise
    except ResponseError:
        aof_match = None
    if aof_match is None:
        return FoundDurability("unknown")
    if aof_match[1] == b"0":
        return FoundDurability("none")
    if demanded_durability == "any":
        return FoundDurability("unknown")
    try:
        await send_command("WAITAOF", "0", "0", "1")
    except WrongReply:
        raise
    except ResponseError:  # Redis 7.0 has no WAITAOF
        return FoundDurability("unknown")
    return FoundDurability("always", waits_for_disk=True)
