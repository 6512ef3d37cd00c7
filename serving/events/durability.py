"""Durability of the Redis that events lie in, as its own settings have it."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

from redis.exceptions import ResponseError

from cache.config.events import Durability
from cache.resp.reply_shapes import WrongReply

Persistence = Literal["always", "everysec", "none", "unknown"]
"""State of an event when it is accepted: on disk; there within a second; in memory alone; or nobody tells."""

_RANKS: Final = {"always": 2, "everysec": 1, "none": 0, "unknown": 0}
_AOF = re.compile(rb"aof_enabled:([01])")

CommandSender = Callable[..., Awaitable[Any]]
"""Sends the words of a command, and gives its reply; raises redis-py's errors."""


class FoundDurability(NamedTuple):
    """Durability that a server was found to have; `waits` if each call has to wait for the disk, to be sure."""

    persistence: Persistence
    waits: bool = False

    def suffices(self, demanded: Durability) -> bool:
        """True if nothing less than what is demanded is promised."""
        return demanded == "any" or _RANKS[self.persistence] >= _RANKS[demanded]


async def durability_of(send_command: CommandSender, demanded: Durability) -> FoundDurability:
    """Looks at the server's settings, or where it does not tell them at what it says of its log.

    A server that does not tell how often it writes to disk, and has WAITAOF, is made to wait where more than `any` is
    demanded.
    """
    try:
        flat = await send_command("CONFIG GET", "*append*")
    except WrongReply:
        raise
    except ResponseError:  # this user may not, or it is renamed
        flat = []
    value_by_setting = dict(zip(flat[::2], flat[1::2], strict=False))
    if b"appendonly" in value_by_setting:
        fsync = value_by_setting.get(b"appendfsync")
        # While a server rewrites its log and does not write it to disk, half a minute of events may be lost.
        pauses = value_by_setting.get(b"no-appendfsync-on-rewrite") == b"yes"
        if (
            value_by_setting[b"appendonly"] != b"yes"
            or pauses
            or fsync not in (b"always", b"everysec")
        ):
            return FoundDurability("none")
        return FoundDurability("always" if fsync == b"always" else "everysec")
    try:
        aof_match = _AOF.search(await send_command("INFO", "persistence"))
    except WrongReply:
        raise
    except ResponseError:
        aof_match = None
    if aof_match is None:
        return FoundDurability("unknown")
    if aof_match[1] == b"0":
        return FoundDurability("none")
    if demanded == "any":
        return FoundDurability("unknown")
    try:
        await send_command("WAITAOF", "0", "0", "1")
    except WrongReply:
        raise
    except ResponseError:  # Redis 7.0 has none
        return FoundDurability("unknown")
    return FoundDurability("always", waits=True)
