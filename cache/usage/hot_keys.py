"""Sketches of requests in Redis: the most requested ids of this hour and the last.

One for ids that the night knows, by the hour (HOT), one for the others, by the day (COLD).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cache.l2.control_plane import ControlPlane
from cache.l2.errors import as_unavailable
from cache.l2.resp import SCORED_MEMBERS_SHAPE, checked_reply

HOUR_S = 3_600
HOT_LIFE_S = 2 * HOUR_S
"""Seconds to the expiry, from an hour's last report: no id stays longer than three hours after it was asked for."""
DAY_S = 86_400


class Window(NamedTuple):
    """Time window of one sketch key: the seconds it covers, and its expiry after its last report."""

    seconds: int
    life_s: int


HOT_WINDOW = Window(HOUR_S, HOT_LIFE_S)
COLD_WINDOW = Window(DAY_S, 2 * DAY_S)
"""Daily window, so that two nights may read it; no id stays longer than three days after it was asked for."""

MEMBERS_MAX = 4_096
"""Members kept per window (hour or day); the least counted are evicted first."""

MEMBERS_READ_AT_ONCE = 256
"""Members in one reply: 0.1 ms of Redis, which readers wait for, and 1 to 3 ms of the event loop that reads it."""

EntityName = tuple[str, bytes]
"""A table and the raw id of an entity."""

# One script and not a pipeline: at no moment is there more than `MEMBERS_MAX`, or an hour that does not expire. What
# must go goes first: at maxmemory Redis refuses the rest.
REPORT_SCRIPT = """
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

    `window_number` is the number of the window that it counts for.
    """

    window_number: int
    name_counts: Sequence[tuple[EntityName, int]]
    removed_names: Sequence[EntityName] = ()
    window: Window = HOT_WINDOW

    def arguments(self) -> list[Any]:
        """ARGV of `REPORT_SCRIPT`."""
        arguments: list[Any] = [MEMBERS_MAX, self.window.life_s, len(self.name_counts)]
        for name, count in self.name_counts:
            arguments += count, sketch_member_of(name)
        return arguments + [sketch_member_of(name) for name in self.removed_names]


def window_number_of(unix_seconds: float, window: Window = HOT_WINDOW) -> int:
    """The hour (or day) that a moment (Unix seconds, Redis' clock) counts for."""
    return int(unix_seconds // window.seconds)


def sketch_member_of(name: EntityName) -> bytes:
    """Sketch member of an entity, `table:id`; no table has a colon in its name."""
    return b"%b:%b" % (name[0].encode(), name[1])


def hottest_names(replies_by_window: Iterable[Sequence[bytes]]) -> list[EntityName]:
    """The names of all hours, most asked first; each hour is what ZREVRANGE WITHSCORES replied."""
    count_by_member: dict[bytes, float] = {}
    for replies in replies_by_window:
        # Read in pieces, between which members may have changed places: each counts once.
        for sketch_member, count in dict(zip(replies[::2], replies[1::2], strict=True)).items():
            count_by_member[sketch_member] = count_by_member.get(sketch_member, 0.0) + float(count)
    ranked_members = sorted(count_by_member, key=count_by_member.__getitem__, reverse=True)[:MEMBERS_MAX]
    member_parts = [sketch_member.partition(b":") for sketch_member in ranked_members]
    return [(table.decode(errors="replace"), raw_id) for table, _, raw_id in member_parts if raw_id]


class SharedHotKeys:
    """Sketches of one namespace, which all its replicas add to; everything here raises TierUnavailable."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def add_report(self, report: HotKeyReport) -> None:
        """Add a replica's requests to the sketch of a window."""
        keys = self._sketch_keys(report.window_number, report.window)
        await self._control.execute("EVAL", REPORT_SCRIPT, len(keys), *keys, *report.arguments())

    async def fetch_names(self, window_number: int, window: Window = HOT_WINDOW) -> list[EntityName]:
        """Return the most requested names of all replicas in this window and the last, hottest first.

        For COLD windows these are names that no generation knew; `window_number` is the window's number.
        """
        return hottest_names([await self._fetch_members(key) for key in self._sketch_keys(window_number, window)])

    def _sketch_keys(self, window_number: int, window: Window) -> tuple[str, str]:
        """Return the keys of a window's sketch and of the one before."""
        keyspace = self._control.keyspace
        key_of_window = keyspace.cold_names if window is COLD_WINDOW else keyspace.hot_names
        return key_of_window(window_number), key_of_window(window_number - 1)

    async def _fetch_members(self, key: str) -> list[bytes]:
        scored_members: list[bytes] = []
        for first_rank in range(0, MEMBERS_MAX, MEMBERS_READ_AT_ONCE):
            last_rank = first_rank + MEMBERS_READ_AT_ONCE - 1
            reply = await self._control.execute("ZREVRANGE", key, first_rank, last_rank, "WITHSCORES")
            with as_unavailable():
                members_page = checked_reply("ZREVRANGE", reply, SCORED_MEMBERS_SHAPE)
                scored_members += members_page
            if len(members_page) < 2 * MEMBERS_READ_AT_ONCE:
                break
        return scored_members
