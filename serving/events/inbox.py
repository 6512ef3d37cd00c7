"""Consumer of the inbox: events that producers write into Redis themselves, for a group of all workers to take in."""

import asyncio
import logging
from typing import Any, Final, NamedTuple

from cache.errors import LarderError
from cache.format.redis_keys import Keyspace
from cache.process.background_loops import BackgroundLoops, stop
from serving.events.acceptor import PIECE
from serving.events.connection import EventsFull, EventsRedis, EventsUnavailable
from serving.events.intake import EventIntake

log = logging.getLogger(__name__)

GROUP: Final = "larder"
BLOCK_MS: Final = 1_000
CLAIM_AFTER_MS: Final = 30_000
"""Milliseconds after which an entry that some consumer took and did not finish is taken by another one."""
CLAIM_EVERY_S: Final = 10.0
FORGET_AFTER_MS: Final = 3_600_000
"""Milliseconds of silence after which a consumer without entries is forgotten: each start is a new one."""
PAUSE_S: Final = 1.0
"""Seconds until the next try where Redis is away or the stream is full."""

_BEGIN: Final = b"0-0"

# In one script: an entry that a consumer took between a look and DELCONSUMER would be lost with it.
_FORGET = """
local gone = 0
for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local told = {}
  for i = 1, #each, 2 do told[each[i]] = each[i + 1] end
  if told['pending'] == 0 and told['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], told['name'])
    gone = gone + 1
  end
end
return gone
"""

# Both or neither: an entry that is no longer pending and still there would count as lag for ever. No MULTI: at its
# maxmemory Redis refuses whatever is queued.
_FINISH = """
local ids = {unpack(ARGV, 2)}
redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
return redis.call('XDEL', KEYS[1], unpack(ids))
"""


class InboxEntry(NamedTuple):
    """Entry of the inbox: its id, and its fields as they were written."""

    id: bytes
    fields: dict[bytes, bytes]


class Inbox:
    """Consumer of the inbox, one in each process.

    An entry is removed once its event was accepted, or rejected and kept as such: a consumer that dies before leaves
    it to another one, for whom the event's id makes a repetition none.
    """

    def __init__(
        self,
        redis: EventsRedis,
        keyspace: Keyspace,
        intake: EventIntake,
        name: str,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self._loops = BackgroundLoops() if loops is None else loops
        self._redis, self._key, self._intake, self._name = redis, keyspace.inbox, intake, name
        self._has_unfinished = True
        """True while entries may be left that this consumer took and did not finish."""
        self._claimed_at = float("-inf")
        self._cursor: bytes = _BEGIN
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to take entries, and goes on."""
        self._task = self._loops.start("event_inbox", self.consume)

    async def aclose(self) -> None:
        """Stops; what was taken and not finished is another consumer's after a while."""
        await stop([self._task])

    async def consume(self) -> None:
        """Take entries in until that fails; return where its Redis is full or away, after a pause."""
        try:
            await self._redis.execute("XGROUP CREATE", self._key, GROUP, "0", "MKSTREAM")
        except EventsFull:
            pass  # at maxmemory no group is made, nor looked for: the one that may be there empties the inbox
        except EventsUnavailable as error:
            if "BUSYGROUP" not in str(error):
                await asyncio.sleep(PAUSE_S)
                return
        try:
            while True:
                await self._take_in(await self._next())
        except LarderError as error:  # full, away, or the group is gone with all of Redis
            log.warning("the inbox of events waits: %s", error.message)
        finally:
            self._has_unfinished = True
        await asyncio.sleep(PAUSE_S)

    async def _next(self) -> list[InboxEntry]:
        """Entries left from before, else those of consumers that fell silent, else new ones."""
        if self._has_unfinished:
            if unfinished_entries := await self._read("0"):
                return unfinished_entries
            self._has_unfinished = False
        now_s = asyncio.get_running_loop().time()
        if now_s - self._claimed_at >= CLAIM_EVERY_S:
            claim = (self._key, GROUP, self._name, CLAIM_AFTER_MS, self._cursor, "COUNT", PIECE)
            self._cursor, claimed = (await self._redis.execute("XAUTOCLAIM", *claim))[:2]
            if claimed or self._cursor != _BEGIN:
                return _entries(claimed)
            self._claimed_at = now_s
            await self._redis.execute("EVAL", _FORGET, 1, self._key, GROUP, FORGET_AFTER_MS)
        return await self._read(">", "BLOCK", BLOCK_MS)

    async def _read(self, after: str, *options: Any) -> list[InboxEntry]:
        reply = await self._redis.execute(
            "XREADGROUP", "GROUP", GROUP, self._name, "COUNT", PIECE, *options, "STREAMS", self._key, after
        )  # fmt: skip
        return _entries(reply[0][1]) if reply else []

    async def _take_in(self, entries: list[InboxEntry]) -> None:
        if not entries:
            return
        present_entries = [(entry.id.decode(), entry.fields) for entry in entries if entry.fields]
        await self._intake.accept_entries(present_entries)
        ids = [entry.id for entry in entries]
        await self._redis.execute("EVAL", _FINISH, 1, self._key, GROUP, *ids)


def _entries(raw_entries: list[Any]) -> list[InboxEntry]:
    """Entries of a reply; one that was deleted meanwhile has no fields, and is finished with the others."""
    return [
        InboxEntry(entry, dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {})
        for entry, flat in filter(None, raw_entries)
    ]
