"""Sketches of requests in Redis: the most requested ids of the current window and the one before.

HOT_WINDOW: ids that the night knows, per hour. COLD_WINDOW: other ids, per day.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cache.l2.control_plane import ControlPlane
from cache.l2.errors import as_unavailable
from cache.l2.resp import SCORED_MEMBERS_SHAPE, checked_reply

HOUR_S = 3_600
HOT_LIFE_S = 2 * HOUR_S
"""Seconds from an hour's last report to the expiry: no id is kept for more than three hours after its last request."""
DAY_S = 86_400


class Window(NamedTuple):
    """Time window of a sketch: the seconds that it covers, and the seconds from its last report to its expiry."""

    covered_seconds: int
    sketch_life_s: int


HOT_WINDOW = Window(HOUR_S, HOT_LIFE_S)
COLD_WINDOW = Window(DAY_S, 2 * DAY_S)
"""Daily window, kept so long that two nights may read it; no id is kept for more than three days after its last
request."""

MEMBERS_MAX = 4_096
"""Largest number of members kept per window; those with the lowest counts are evicted."""

MEMBERS_READ_AT_ONCE = 256
"""Members per reply: takes 0.1 ms of Redis, for which readers wait, and 1 to 3 ms of the reading event loop."""

EntityName = tuple[str, bytes]
"""Table name and raw id of an entity."""

# A script instead of a pipeline: the sketch never has more than `MEMBERS_MAX` members or lacks an expiry. Removals come
# first, because at maxmemory Redis refuses the other commands.
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
    """Request counts of a replica since its last report; `removed_names` are removed from the sketch.

    `window_number` is the window to which the counts belong.
    """

    window_number: int
    name_counts: Sequence[tuple[EntityName, int]]
    removed_names: Sequence[EntityName] = ()
    window: Window = HOT_WINDOW

    def script_arguments(self) -> list[Any]:
        """Return ARGV of `REPORT_SCRIPT`."""
        script_arguments: list[Any] = [MEMBERS_MAX, self.window.sketch_life_s, len(self.name_counts)]
        for name, count in self.name_counts:
            script_arguments += count, sketch_member_of(name)
        return script_arguments + [sketch_member_of(name) for name in self.removed_names]


def window_number_of(unix_seconds: float, window: Window = HOT_WINDOW) -> int:
    """Return the number of the window that contains a time (Unix seconds, Redis' clock)."""
    return int(unix_seconds // window.covered_seconds)


def sketch_member_of(name: EntityName) -> bytes:
    """Return the sketch member of an entity, `table:id`; no table name contains a colon."""
    return b"%b:%b" % (name[0].encode(), name[1])


def hottest_names(replies_by_window: Iterable[Sequence[bytes]]) -> list[EntityName]:
    """Return the names of all windows, most requested first; each window is a reply of ZREVRANGE WITHSCORES."""
    count_by_member: dict[bytes, float] = {}
    for replies in replies_by_window:
        # A reply is read in pieces, between which members may change places: count each member once.
        for sketch_member, count in dict(zip(replies[::2], replies[1::2], strict=True)).items():
            count_by_member[sketch_member] = count_by_member.get(sketch_member, 0.0) + float(count)
    ranked_members = sorted(count_by_member, key=count_by_member.__getitem__, reverse=True)[:MEMBERS_MAX]
    member_parts = [sketch_member.partition(b":") for sketch_member in ranked_members]
    return [(table.decode(errors="replace"), raw_id) for table, _, raw_id in member_parts if raw_id]


class SharedHotKeys:
    """Sketches of one namespace, shared by its replicas; all methods raise TierUnavailable."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def add_report(self, report: HotKeyReport) -> None:
        """Add a replica's requests to the sketch of a window."""
        keys = self._sketch_keys(report.window_number, report.window)
        await self._control.execute("EVAL", REPORT_SCRIPT, len(keys), *keys, *report.script_arguments())

    async def fetch_names(self, window_number: int, window: Window = HOT_WINDOW) -> list[EntityName]:
        """Return the names most requested from all replicas in this window and the one before, most requested first.

        For COLD_WINDOW these are ids that no generation knew. `window_number` is the window's number.
        """
        return hottest_names([await self._fetch_members(key) for key in self._sketch_keys(window_number, window)])

    def _sketch_keys(self, window_number: int, window: Window) -> tuple[str, str]:
        """Return the keys of the sketches of a window and of the window before."""
        keyspace = self._control.keyspace
        key_of_window = keyspace.cold_names if window is COLD_WINDOW else keyspace.hot_names
        return key_of_window(window_number), key_of_window(window_number - 1)

    async def _fetch_members(self, sketch_key: str) -> list[bytes]:
        scored_members: list[bytes] = []
        for first_rank in range(0, MEMBERS_MAX, MEMBERS_READ_AT_ONCE):
            last_rank = first_rank + MEMBERS_READ_AT_ONCE - 1
            reply = await self._control.execute("ZREVRANGE", sketch_key, first_rank, last_rank, "WITHSCORES")
            with as_unavailable():
                members_page = checked_reply("ZREVRANGE", reply, SCORED_MEMBERS_SHAPE)
                scored_members += members_page
            if len(members_page) < 2 * MEMBERS_READ_AT_ONCE:
                break
        return scored_members
