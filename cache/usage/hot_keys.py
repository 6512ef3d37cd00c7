"""Sketches of requests in Redis: the most requested ids of this hour and the last.

One for ids that the night knows, by the hour (HOT), one for the others, by the day (COLD).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cache.l2.control_plane import ControlPlane
from cache.l2.errors import as_unavailable
from cache.l2.resp import SCORED_MEMBERS_SHAPE, checked_reply

HOUR_S = 3_600
LIFE_S = 2 * HOUR_S
"""Seconds to the expiry, from an hour's last report: no id stays longer than three hours after it was asked for."""
DAY_S = 86_400


class Window(NamedTuple):
    """Time window of one sketch key: the seconds it covers, and its expiry after its last report."""

    seconds: int
    life_s: int


HOT_WINDOW = Window(HOUR_S, LIFE_S)
COLD_WINDOW = Window(DAY_S, 2 * DAY_S)
"""Daily window, so that two nights may read it; no id stays longer than three days after it was asked for."""

MEMBERS_MAX = 4_096
"""Members kept per window (hour or day); the least counted are evicted first."""

READ_AT_ONCE = 256
"""Members in one reply: 0.1 ms of Redis, which readers wait for, and 1 to 3 ms of the event loop that reads it."""

Name = tuple[str, bytes]
"""A table and the raw id of an entity."""

# One script and not a pipeline: at no moment is there more than `MEMBERS_MAX`, or an hour that does not expire. What
# must go goes first: at maxmemory Redis refuses the rest.
REPORT = """
local last = 3 + 2 * ARGV[3]
for at = last + 1, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[at])
  redis.call('ZREM', KEYS[2], ARGV[at])
end
for at = 4, last, 2 do redis.call('ZINCRBY', KEYS[1], ARGV[at], ARGV[at + 1]) end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
"""


class HotKeyReport(NamedTuple):
    """Request counts of a replica since its last report; `removed_names` must not be in the sketch.

    `hour` is the number of the window that it counts for.
    """

    hour: int
    counts: Sequence[tuple[Name, int]]
    removed_names: Sequence[Name] = ()
    window: Window = HOT_WINDOW

    def arguments(self) -> list[Any]:
        """ARGV of `REPORT`."""
        arguments: list[Any] = [MEMBERS_MAX, self.window.life_s, len(self.counts)]
        for name, count in self.counts:
            arguments += count, member(name)
        return arguments + [member(name) for name in self.removed_names]


def hour_of(at: float, window: Window = HOT_WINDOW) -> int:
    """The hour (or day) that a moment (Unix seconds, Redis' clock) counts for."""
    return int(at // window.seconds)


def member(name: Name) -> bytes:
    """Sketch member of an entity, `table:id`; no table has a colon in its name."""
    return b"%b:%b" % (name[0].encode(), name[1])


def hottest(hours: Iterable[Sequence[bytes]]) -> list[Name]:
    """The names of all hours, most asked first; each hour is what ZREVRANGE WITHSCORES replied."""
    counts: dict[bytes, float] = {}
    for replies in hours:
        # Read in pieces, between which members may have changed places: each counts once.
        for sketch_member, count in dict(zip(replies[::2], replies[1::2], strict=True)).items():
            counts[sketch_member] = counts.get(sketch_member, 0.0) + float(count)
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)[:MEMBERS_MAX]
    parts = [sketch_member.partition(b":") for sketch_member in ranked]
    return [(table.decode(errors="replace"), raw) for table, _, raw in parts if raw]


class SharedHotKeys:
    """Sketches of one namespace, which all its replicas add to; everything here raises TierUnavailable."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def add_report(self, report: HotKeyReport) -> None:
        """Add a replica's requests to the sketch of a window."""
        keys = self._sketch_keys(report.hour, report.window)
        await self._control.execute("EVAL", REPORT, len(keys), *keys, *report.arguments())

    async def fetch_names(self, hour: int, window: Window = HOT_WINDOW) -> list[Name]:
        """Return the most requested names of all replicas in this window and the last, hottest first.

        For COLD windows these are names that no generation knew; `hour` is the window's number.
        """
        return hottest([await self._members(key) for key in self._sketch_keys(hour, window)])

    def _sketch_keys(self, number: int, window: Window) -> tuple[str, str]:
        """Return the keys of a window's sketch and of the one before."""
        keyspace = self._control.keyspace
        name = keyspace.cold_names if window is COLD_WINDOW else keyspace.hot_names
        return name(number), name(number - 1)

    async def _members(self, key: str) -> list[bytes]:
        scored_members: list[bytes] = []
        for start in range(0, MEMBERS_MAX, READ_AT_ONCE):
            last = start + READ_AT_ONCE - 1
            reply = await self._control.execute("ZREVRANGE", key, start, last, "WITHSCORES")
            with as_unavailable():
                piece = checked_reply("ZREVRANGE", reply, SCORED_MEMBERS_SHAPE)
                scored_members += piece
            if len(piece) < 2 * READ_AT_ONCE:
                break
        return scored_members
