"""Timetable of nights: their steps, the cron by which they are due, and the retries of the DAG's tasks.

Imports nothing large, such as numpy: every task parses its DAG file again.
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
"""Stages of a night, in order; the steps of one stage run in parallel."""

PRELIMINARY_STEPS = ("take_events",)
"""Steps before those of the night, if events are accepted; no generation id exists yet."""

NIGHT_STEPS = tuple(chain.from_iterable(NIGHT_STAGES))
"""Names of all steps; modules in `precompute.steps`, reports and times are named after them."""

SEALING_STEP = "load"
"""The first step that needs the manifest, which contains the reports and times of earlier steps."""

STEPS_TIMED_APART = ("assemble", "load", "publish", "warm")
"""Steps whose times are stored in a separate file, not in the manifest (`verify` adds its own times to the
manifest)."""

DEFAULT_CRON, DEFAULT_TIMEZONE, DEFAULT_GRACE_S = "0 3 * * *", "UTC", 10_800.0
"""Schedule if none is set."""

GRACE_MAX_S = 366 * 86_400.0

CLOCKS_APART_S = 300.0
"""Seconds by which the clocks of builder, publisher and reader may differ; with a larger difference a generation is
attributed to another tick."""

MISSED_TICKS_MAX = 9
"""Largest number of missed ticks that is counted exactly."""

RETRY_BACK_OFF = 2.0
"""Factor by which Airflow's pause grows from one retry of a task to the next."""

_SEARCHED_AHEAD_MAX_S = 40 * 366 * 86_400.0
"""Seconds searched ahead: a 29th of February on a given weekday recurs within 28 years, or 40 years around a year like
2100."""

_DAY = timedelta(days=1)
_RANDOM_FIELD_PATTERN = re.compile(r"(?:^|[\s,])[rR]")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Cron of five fields in an IANA time zone; a generation may appear up to `grace_s` after its tick.

    A local time that a clock change skips is due as much later as the clock moves; a local time that occurs twice is
    due the second time; with an hourly cron, both are due. Raises ConfigError if no tick can be computed.
    """

    cron: str = DEFAULT_CRON
    timezone: str = DEFAULT_TIMEZONE
    grace_s: float = DEFAULT_GRACE_S
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)
    _parsed_cron: croniter = field(init=False, repr=False, compare=False)
    _is_hourly: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s <= GRACE_MAX_S:
            raise ConfigError(
                f"schedule_grace_s is a number of seconds from 0 to {GRACE_MAX_S:.0f} (366 days), not {self.grace_s}",
                field="schedule_grace_s",
            )
        object.__setattr__(self, "_zone", _load_zone(self.timezone))
        object.__setattr__(self, "_parsed_cron", _parse_cron(self.cron))
        object.__setattr__(self, "_is_hourly", self._parsed_cron.expanded[1] == ["*"])

    def tick_before(self, unix_seconds: float) -> float:
        """Return the last tick at or before `unix_seconds`; both in Unix seconds."""
        # Ticks are whole seconds: with rounding, the frequent probes find the result cached.
        return _tick_before(self, math.floor(unix_seconds))

    def _tick_before(self, unix_seconds: int) -> float:
        utc_moment = datetime.fromtimestamp(unix_seconds, UTC)
        local_time = utc_moment.astimezone(self._zone).replace(tzinfo=None)
        # When clocks go back near `at`, a later wall time may have come earlier; check those wall times as well.
        clock_change_slack = self._clock_change_slack(utc_moment)
        latest_tick: datetime | None = None
        for wall_time in self._wall_times_before(local_time + clock_change_slack):
            if latest_tick is not None and wall_time < local_time - clock_change_slack:
                break
            due_ticks = [tick for tick in self._utc_moments(wall_time) if tick <= utc_moment]
            latest_tick = max([*due_ticks, *([latest_tick] if latest_tick else [])], default=None)
        if latest_tick is None:
            raise ConfigError(f"schedule {self.cron!r} has no tick before {utc_moment.isoformat()}")
        return latest_tick.timestamp()

    def tick_after(self, unix_seconds: float) -> float:
        """Return the first tick after `unix_seconds`; both in Unix seconds, accurate to the second."""
        previous_tick, step_s = self.tick_before(unix_seconds), 60.0
        while self.tick_before(unix_seconds + step_s) <= previous_tick:
            step_s *= 2
            if step_s > _SEARCHED_AHEAD_MAX_S:
                raise ConfigError(f"schedule {self.cron!r} has no tick in the next 40 years")
        low, high = unix_seconds, unix_seconds + step_s
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if self.tick_before(middle) <= previous_tick else (low, middle)
        return self.tick_before(high)

    def due_tick(self, now_s: float) -> float:
        """Return the newest tick whose grace period has passed by `now_s`, so that its generation should exist."""
        return self.tick_before(now_s - self.grace_s)

    def is_generation_missing(self, now_s: float, generation_created_at: float | None) -> bool:
        """Return whether the live generation (None: there is none) was created before the newest due tick.

        A creation time in the future also counts as missing.
        """
        return self.count_missed_ticks(now_s, generation_created_at, missed_ticks_max=1) > 0

    def count_missed_ticks(
        self, now_s: float, generation_created_at: float | None, *, missed_ticks_max: int = MISSED_TICKS_MAX
    ) -> int:
        """Return the number of due ticks since the live generation was created, at most `missed_ticks_max`."""
        if generation_created_at is None or generation_created_at > now_s + CLOCKS_APART_S:
            return missed_ticks_max
        due_tick, missed_count = self.due_tick(now_s), 0
        while missed_count < missed_ticks_max:
            previous_tick = self.tick_before(due_tick - 1)
            if generation_created_at >= due_tick - min(CLOCKS_APART_S, (due_tick - previous_tick) / 2):
                break
            due_tick, missed_count = previous_tick, missed_count + 1
        return missed_count

    def _clock_change_slack(self, utc_moment: datetime) -> timedelta:
        utc_offsets = [
            (utc_moment + day_offset).astimezone(self._zone).utcoffset() or timedelta()
            for day_offset in (-_DAY, timedelta(), _DAY)
        ]
        return max(utc_offsets) - min(utc_offsets)

    def _wall_times_before(self, latest_wall_time: datetime) -> Iterator[datetime]:
        """Yield matching wall times at or before `latest_wall_time`, newest first."""
        start = latest_wall_time.replace(microsecond=0) + timedelta(seconds=1)
        cron = copy.copy(self._parsed_cron)  # parsing takes as long as all other work here
        cron.set_current(start, force=True)
        while True:
            try:
                wall_time: datetime = cron.get_prev(datetime)
            except CroniterError:
                return
            yield wall_time

    def _utc_moments(self, wall_time: datetime) -> list[datetime]:
        """Return the UTC moments at which the wall clock shows this time and a tick is due."""
        first, second = (wall_time.replace(tzinfo=self._zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if first > second:  # a skipped time; the later of the two values is the moment after the gap
            return [] if self._is_hourly else [first]
        return [first, second] if self._is_hourly else [second]


@functools.lru_cache(maxsize=256)
def _tick_before(schedule: Schedule, unix_seconds: int) -> float:
    return schedule._tick_before(unix_seconds)


def _load_zone(zone_name: str) -> ZoneInfo:
    try:
        return ZoneInfo(zone_name)
    except (KeyError, ValueError, OSError, TypeError) as error:
        raise ConfigError(
            f"timezone is an IANA name such as Europe/Berlin, not {zone_name!r}; where no zone is known, install the "
            "tzdata package",
            field="timezone",
        ) from error


def _parse_cron(cron: str) -> croniter:
    """Parse the cron and check that it has ticks."""
    try:
        parsed = croniter(cron, start_time=datetime(2026, 1, 1))  # noqa: DTZ001  wall times have no zone
        if len(parsed.expanded) != 5:
            raise ValueError("it does not have five fields")
        if _RANDOM_FIELD_PATTERN.search(cron):
            raise ValueError("R means a random time, which differs between programs")
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
    """Schedule of generations, at the top level of the file."""

    FROM_ENVIRONMENT: ClassVar[tuple[str, ...] | None] = ("schedule", "timezone", "schedule_grace_s")

    schedule: str = DEFAULT_CRON
    """Cron (five fields) of the DAG `nightly_precompute`; the service expects a generation after each of its ticks."""
    timezone: str = DEFAULT_TIMEZONE
    """IANA name of the cron's time zone. Skipped and repeated local times are due as in Airflow."""
    schedule_grace_s: float = DEFAULT_GRACE_S
    """Seconds that a generation may take after its tick before it counts as missing; 0 to 31,622,400 (366 days)."""

    def __post_init__(self) -> None:
        self.nights()

    def nights(self) -> Schedule:
        """Return the schedule by which generations should exist."""
        return Schedule(self.schedule, self.timezone, self.schedule_grace_s)

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "Timetable":
        """Return the timetable of the file that LARDER_CONFIG names; the environment overrides it."""
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        return read_section(cls, file.top_level_values(cls), file, environ)


@section
class DagConfig:
    """Retries, time limits and publication of the DAG `nightly_precompute`, in `[dag]`.

    A retry does not repeat what an interrupted try has already loaded or read back.
    """

    FROM_ENVIRONMENT: ClassVar = ("retry_delay_s",)

    publish: Literal["all", "canary"] = "all"
    """Whether a night publishes to all requests (`all`), or first to a share of them by the DAG `canary` (`canary`),
    which must be unpaused. A first generation is published to all, as there is none to compare it with. Read when DAG
    files are parsed."""
    retries: NonNegativeInt = 5
    """Number of retries after a failed try."""
    retry_delay_s: PositiveFloat = 10.0
    """Seconds before the first retry, doubled for each further one; read when DAG files are parsed."""
    retry_delay_max_s: PositiveFloat = 600.0
    """Longest pause before a retry, in seconds."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds that one try of a task may take."""
    score_timeout_s: PositiveFloat = 10_800.0
    """Seconds that one try of scoring one shard may take."""
    load_timeout_s: PositiveFloat = 14_400.0
    """Seconds that one try of `load`, `publish` or a task of the DAG `canary` may take; while there are readers, a load
    may proceed at `[governor] floor_mib_s` only (16 MiB/s: 230 GB in 4 hours)."""
    verify_timeout_s: PositiveFloat = 14_400.0
    """Seconds that one try of `verify` may take; it takes about as long as the load."""

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "DagConfig":
        """Return the section [dag] of the file that LARDER_CONFIG names; LARDER_RETRY_DELAY_S overrides it."""
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        return read_section(cls, file.section_values("dag"), file, environ, section_name="dag")

    def default_task_arguments(self) -> dict[str, Any]:
        """Return Airflow's `default_args` of all tasks."""
        return {
            "retries": self.retries,
            "retry_delay": timedelta(seconds=self.retry_delay_s),
            "retry_exponential_backoff": RETRY_BACK_OFF,
            "max_retry_delay": timedelta(seconds=self.retry_delay_max_s),
            "execution_timeout": timedelta(seconds=self.timeout_s),
        }
