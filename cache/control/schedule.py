"""Schedule of generations: the ticks of a cron in a time zone, as Airflow's `CronTriggerTimetable` has them."""

import copy
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from croniter import croniter
from croniter.croniter import CroniterError

from cache.errors import ConfigError

CRON, TIMEZONE, GRACE_S = "0 3 * * *", "UTC", 10_800.0

GRACE_MAX_S = 366 * 86_400.0

CLOCKS_APART_S = 300.0
"""Seconds by which builder's, publisher's and reader's clocks may differ; beyond, a generation is another tick's."""

MISSED_MAX = 9
"""Greatest number of missed ticks counted; more need not be told apart."""
_AHEAD_MAX_S = 40 * 366 * 86_400.0
"""Seconds searched ahead: a 29th of February on a given weekday comes within 28 years, 40 around a year like 2100."""

_DAY = timedelta(days=1)
_RANDOM = re.compile(r"(?:^|[\s,])[rR]")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A cron of five fields in an IANA time zone; a generation may take `grace_s` to appear after its tick.

    A local time that a change of clocks skips is due that much later, one that comes twice is due the second time;
    a cron of every hour is due in both. Raises ConfigError for what no tick can be computed from.
    """

    cron: str = CRON
    timezone: str = TIMEZONE
    grace_s: float = GRACE_S
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)
    _parsed: croniter = field(init=False, repr=False, compare=False)
    _is_hourly: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s <= GRACE_MAX_S:
            raise ConfigError(
                f"schedule_grace_s is a number of seconds from 0 to {GRACE_MAX_S:.0f} (366 days), not {self.grace_s}",
                field="schedule_grace_s",
            )
        object.__setattr__(self, "_zone", _zone(self.timezone))
        object.__setattr__(self, "_parsed", _parsed(self.cron))
        object.__setattr__(self, "_is_hourly", self._parsed.expanded[1] == ["*"])

    def tick_before(self, at: float) -> float:
        """The last tick at or before `at`; both Unix seconds."""
        # Ticks are whole seconds, and probes, which anybody may send, ask about the same few again and again.
        return _tick_before(self, math.floor(at))

    def _tick_before(self, at: int) -> float:
        moment = datetime.fromtimestamp(at, UTC)
        local = moment.astimezone(self._zone).replace(tzinfo=None)
        # Where clocks go back near `at`, later wall times may have come earlier: those are looked at as well.
        slack = self._slack(moment)
        latest_tick: datetime | None = None
        for wall in self._walls_before(local + slack):
            if latest_tick is not None and wall < local - slack:
                break
            due = [tick for tick in self._moments(wall) if tick <= moment]
            latest_tick = max([*due, *([latest_tick] if latest_tick else [])], default=None)
        if latest_tick is None:
            raise ConfigError(f"schedule {self.cron!r} has no tick before {moment.isoformat()}")
        return latest_tick.timestamp()

    def tick_after(self, at: float) -> float:
        """The first tick after `at`, both Unix seconds, to the second."""
        previous_tick, step_s = self.tick_before(at), 60.0
        while self.tick_before(at + step_s) <= previous_tick:
            step_s *= 2
            if step_s > _AHEAD_MAX_S:
                raise ConfigError(f"schedule {self.cron!r} has no tick in the next years")
        low, high = at, at + step_s
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self.tick_before(middle) <= previous_tick else (low, middle)
            )
        return self.tick_before(high)

    def due(self, now_s: float) -> float:
        """The newest tick whose generation should exist by `now_s`: its grace has passed."""
        return self.tick_before(now_s - self.grace_s)

    def is_missing(self, now_s: float, created_at: float | None) -> bool:
        """True if the live generation (created at `created_at`; None: there is none) is older than the newest due tick.

        A generation that claims to be from the future proves nothing either.
        """
        return self.missed(now_s, created_at, at_most=1) > 0

    def missed(self, now_s: float, created_at: float | None, *, at_most: int = MISSED_MAX) -> int:
        """Number of due ticks that no live generation has followed, at most `at_most`."""
        if created_at is None or created_at > now_s + CLOCKS_APART_S:
            return at_most
        tick, count = self.due(now_s), 0
        while count < at_most:
            previous_tick = self.tick_before(tick - 1)
            if created_at >= tick - min(CLOCKS_APART_S, (tick - previous_tick) / 2):
                break
            tick, count = previous_tick, count + 1
        return count

    def _slack(self, moment: datetime) -> timedelta:
        around = [
            (moment + day_offset).astimezone(self._zone).utcoffset() or timedelta()
            for day_offset in (-_DAY, timedelta(), _DAY)
        ]
        return max(around) - min(around)

    def _walls_before(self, wall: datetime) -> Iterator[datetime]:
        """Matching wall times at or before `wall`, newest first."""
        start = wall.replace(microsecond=0) + timedelta(seconds=1)
        cron = copy.copy(self._parsed)  # parsing it again takes as long as all the rest
        cron.set_current(start, force=True)
        while True:
            try:
                wall_time: datetime = cron.get_prev(datetime)
            except CroniterError:
                return
            yield wall_time

    def _moments(self, wall: datetime) -> list[datetime]:
        """UTC moments at which the wall clock shows this time."""
        first, second = (
            wall.replace(tzinfo=self._zone, fold=fold).astimezone(UTC) for fold in (0, 1)
        )
        if first > second:  # skipped; the later reading of it is the moment after the gap
            return [] if self._is_hourly else [first]
        return [first, second] if self._is_hourly else [second]


@functools.lru_cache(maxsize=256)
def _tick_before(schedule: Schedule, at: int) -> float:
    return schedule._tick_before(at)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError) as error:
        raise ConfigError(
            f"timezone is an IANA name such as Europe/Berlin, not {name!r}; where no zone is known, install the "
            "tzdata package",
            field="timezone",
        ) from error


def _parsed(cron: str) -> croniter:
    """The cron as croniter reads it, once it has proved to have ticks."""
    try:
        parsed = croniter(cron, start_time=datetime(2026, 1, 1))  # noqa: DTZ001  wall times have no zone
        if len(parsed.expanded) != 5:
            raise ValueError("it has not five fields")
        if _RANDOM.search(cron):
            raise ValueError("R is another time for each program that reads it")
        parsed.get_prev(datetime)
    except (CroniterError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule is a cron of five fields such as '0 3 * * *' (minute hour day month weekday), not {cron!r}: "
            f"{error}",
            field="schedule",
        ) from error
    return parsed
