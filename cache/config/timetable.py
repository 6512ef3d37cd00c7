"""Timetable of nights: their steps, the cron by which they are due, and how often the DAG tries its tasks.

Imports neither numpy nor anything else that is heavy: every task parses its DAG file again.
"""

import copy
import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, ClassVar, Literal
from zoneinfo import ZoneInfo

from croniter import croniter
from croniter.croniter import CroniterError
from pydantic import NonNegativeInt, PositiveFloat

from cache.config.section import section
from cache.errors import ConfigError

NIGHT_STAGES = (
    ("begin",),
    ("embed_items",),
    ("score",),
    ("assemble",),
    ("index", "quantize"),
    ("load",),
    ("verify",),
    ("publish",),
    ("warm",),
    ("retire",),
)
"""Stages of a night, one after the other; the steps of one stage run side by side."""

PRELIMINARY_STEPS = ("take_events",)
"""Steps before the night's own, where events are taken in: no generation has a name yet."""

NIGHT_STEPS = tuple(chain.from_iterable(NIGHT_STAGES))
"""Names of all steps: of their modules in `precompute.steps`, their reports, and their times."""

SEALING_STEP = "load"
"""The first step that needs the manifest: it holds reports and times of the steps before."""

STEPS_TIMED_APART = ("assemble", "load", "publish", "warm")
"""Steps whose times are in a file of their own, not in the manifest (`verify` adds its own there)."""

DEFAULT_CRON, DEFAULT_TIMEZONE, DEFAULT_GRACE_S = "0 3 * * *", "UTC", 10_800.0
"""Schedule where no other is set."""

GRACE_MAX_S = 366 * 86_400.0

CLOCKS_APART_S = 300.0
"""Seconds by which builder's, publisher's and reader's clocks may differ; beyond, a generation is another tick's."""

MISSED_TICKS_MAX = 9
"""Greatest number of missed ticks that is counted exactly."""

RETRY_BACK_OFF = 2.0
"""Factor by which Airflow's pause grows from one retry of a task to the next."""

_SEARCHED_AHEAD_MAX_S = 40 * 366 * 86_400.0
"""Seconds searched ahead: a 29th of February on a given weekday comes within 28 years, 40 around a year like 2100."""

_DAY = timedelta(days=1)
_RANDOM_FIELD_PATTERN = re.compile(r"(?:^|[\s,])[rR]")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A cron of five fields in an IANA time zone; a generation may take `grace_s` to appear after its tick.

    A local time that a change of clocks skips is due that much later, one that comes twice is due the second time;
    a cron of every hour is due in both. Raises ConfigError for what no tick can be computed from.
    """

    cron: str = DEFAULT_CRON
    timezone: str = DEFAULT_TIMEZONE
    grace_s: float = DEFAULT_GRACE_S
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)
    _parsed: croniter = field(init=False, repr=False, compare=False)
    _is_hourly: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s <= GRACE_MAX_S:
            raise ConfigError(
                f"schedule_grace_s is a number of seconds from 0 to {GRACE_MAX_S:.0f} (366 days), not {self.grace_s}",
                field="schedule_grace_s",
            )
        object.__setattr__(self, "_zone", _load_zone(self.timezone))
        object.__setattr__(self, "_parsed", _parse_cron(self.cron))
        object.__setattr__(self, "_is_hourly", self._parsed.expanded[1] == ["*"])

    def tick_before(self, at: float) -> float:
        """The last tick at or before `at`; both Unix seconds."""
        # Ticks are whole seconds, and probes, which anybody may send, ask about the same few again and again.
        return _tick_before(self, math.floor(at))

    def _tick_before(self, unix_seconds: int) -> float:
        moment = datetime.fromtimestamp(unix_seconds, UTC)
        local_time = moment.astimezone(self._zone).replace(tzinfo=None)
        # Where clocks go back near `at`, later wall times may have come earlier: those are looked at as well.
        clock_change_slack = self._clock_change_slack(moment)
        latest_tick: datetime | None = None
        for wall_time in self._wall_times_before(local_time + clock_change_slack):
            if latest_tick is not None and wall_time < local_time - clock_change_slack:
                break
            due_ticks = [tick for tick in self._utc_moments(wall_time) if tick <= moment]
            latest_tick = max([*due_ticks, *([latest_tick] if latest_tick else [])], default=None)
        if latest_tick is None:
            raise ConfigError(f"schedule {self.cron!r} has no tick before {moment.isoformat()}")
        return latest_tick.timestamp()

    def tick_after(self, at: float) -> float:
        """The first tick after `at`, both Unix seconds, to the second."""
        previous_tick, step_s = self.tick_before(at), 60.0
        while self.tick_before(at + step_s) <= previous_tick:
            step_s *= 2
            if step_s > _SEARCHED_AHEAD_MAX_S:
                raise ConfigError(f"schedule {self.cron!r} has no tick in the next years")
        low, high = at, at + step_s
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if self.tick_before(middle) <= previous_tick else (low, middle)
        return self.tick_before(high)

    def due_tick(self, now_s: float) -> float:
        """The newest tick whose generation should exist by `now_s`: its grace has passed."""
        return self.tick_before(now_s - self.grace_s)

    def is_missing(self, now_s: float, created_at: float | None) -> bool:
        """True if the live generation (created at `created_at`; None: there is none) is older than the newest due tick.

        A generation that claims to be from the future proves nothing either.
        """
        return self.count_missed(now_s, created_at, missed_max=1) > 0

    def count_missed(self, now_s: float, created_at: float | None, *, missed_max: int = MISSED_TICKS_MAX) -> int:
        """Number of due ticks that no live generation has followed, at most `missed_max`."""
        if created_at is None or created_at > now_s + CLOCKS_APART_S:
            return missed_max
        due_tick, missed_count = self.due_tick(now_s), 0
        while missed_count < missed_max:
            previous_tick = self.tick_before(due_tick - 1)
            if created_at >= due_tick - min(CLOCKS_APART_S, (due_tick - previous_tick) / 2):
                break
            due_tick, missed_count = previous_tick, missed_count + 1
        return missed_count

    def _clock_change_slack(self, moment: datetime) -> timedelta:
        utc_offsets = [
            (moment + day_offset).astimezone(self._zone).utcoffset() or timedelta()
            for day_offset in (-_DAY, timedelta(), _DAY)
        ]
        return max(utc_offsets) - min(utc_offsets)

    def _wall_times_before(self, latest_wall_time: datetime) -> Iterator[datetime]:
        """Matching wall times at or before `latest_wall_time`, newest first."""
        start = latest_wall_time.replace(microsecond=0) + timedelta(seconds=1)
        cron = copy.copy(self._parsed)  # parsing it again takes as long as all the rest
        cron.set_current(start, force=True)
        while True:
            try:
                wall_time: datetime = cron.get_prev(datetime)
            except CroniterError:
                return
            yield wall_time

    def _utc_moments(self, wall_time: datetime) -> list[datetime]:
        """UTC moments at which the wall clock shows this time."""
        first, second = (wall_time.replace(tzinfo=self._zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if first > second:  # skipped; the later reading of it is the moment after the gap
            return [] if self._is_hourly else [first]
        return [first, second] if self._is_hourly else [second]


@functools.lru_cache(maxsize=256)
def _tick_before(schedule: Schedule, at: int) -> float:
    return schedule._tick_before(at)


def _load_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError) as error:
        raise ConfigError(
            f"timezone is an IANA name such as Europe/Berlin, not {name!r}; where no zone is known, install the "
            "tzdata package",
            field="timezone",
        ) from error


def _parse_cron(cron: str) -> croniter:
    """The cron as croniter reads it, once it has proved to have ticks."""
    try:
        parsed = croniter(cron, start_time=datetime(2026, 1, 1))  # noqa: DTZ001  wall times have no zone
        if len(parsed.expanded) != 5:
            raise ValueError("it has not five fields")
        if _RANDOM_FIELD_PATTERN.search(cron):
            raise ValueError("R is another time for each program that reads it")
        parsed.get_prev(datetime)
    except (CroniterError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule is a cron of five fields such as '0 3 * * *' (minute hour day month weekday), not {cron!r}: "
            f"{error}",
            field="schedule",
        ) from error
    return parsed


@section
class Timetable:
    """Schedule of generations, above the file's sections."""

    FROM_ENVIRONMENT: ClassVar[tuple[str, ...] | None] = ("schedule", "timezone", "schedule_grace_s")

    schedule: str = DEFAULT_CRON
    """Cron (five fields) of the DAG `nightly_precompute`; the service expects a generation after each of its ticks."""
    timezone: str = DEFAULT_TIMEZONE
    """IANA name of the zone that the cron is in. Skipped and repeated local times are due as Airflow has them."""
    schedule_grace_s: float = DEFAULT_GRACE_S
    """Seconds that a generation may take after its tick before it counts as missing; 0 to 31,622,400 (366 days)."""

    def __post_init__(self) -> None:
        self.nights()

    def nights(self) -> Schedule:
        """Schedule by which generations should exist."""
        return Schedule(self.schedule, self.timezone, self.schedule_grace_s)

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "Timetable":
        """The timetable of the file that LARDER_CONFIG names, below the environment."""
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        return read_section(cls, file.top_level_values(cls), file, environ)


@section
class DagConfig:
    """Retries, time limits and end of the DAG `nightly_precompute`, in `[dag]`.

    What a try that was cut off has loaded, or read back, the next one does not do again.
    """

    FROM_ENVIRONMENT: ClassVar = ("retry_delay_s",)

    publish: Literal["all", "canary"] = "all"
    """Readers whom a night publishes to: all, or with `canary` a share of the requests first, by the DAG `canary`,
    which has to be unpaused. A first generation is published to all: there is nothing to compare it with. Read where
    DAG files are parsed."""
    retries: NonNegativeInt = 5
    """Number of tries after a failed one."""
    retry_delay_s: PositiveFloat = 10.0
    """Seconds until the next try, twice as long before the one after that, and so on; read where DAG files are
    parsed."""
    retry_delay_max_s: PositiveFloat = 600.0
    """Longest such pause, in seconds."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds that one try of a task may take."""
    score_timeout_s: PositiveFloat = 10_800.0
    """Seconds that one try of scoring one shard may take."""
    load_timeout_s: PositiveFloat = 14_400.0
    """Seconds that one try of `load` or `publish` may take, and one of a task of the DAG `canary`; beside readers a
    load takes up to its bytes at `[governor] floor_mib_s` (16 MiB/s: 230 GB in 4 hours)."""
    verify_timeout_s: PositiveFloat = 14_400.0
    """Seconds that one try of `verify` may take, which is about as long as the load."""

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "DagConfig":
        """The section [dag] of the file that LARDER_CONFIG names; LARDER_RETRY_DELAY_S wins over it."""
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        return read_section(cls, file.section("dag"), file, environ, section_name="dag")

    def defaults(self) -> dict[str, Any]:
        """Airflow's `default_args` of all tasks."""
        return {
            "retries": self.retries,
            "retry_delay": timedelta(seconds=self.retry_delay_s),
            "retry_exponential_backoff": RETRY_BACK_OFF,
            "max_retry_delay": timedelta(seconds=self.retry_delay_max_s),
            "execution_timeout": timedelta(seconds=self.timeout_s),
        }
