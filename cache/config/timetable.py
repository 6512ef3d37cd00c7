"""Timetable of generations, which DAG and service read alike, and how often the DAG tries its tasks.

Imports nothing heavy: every task parses its DAG file again.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat

from cache.config.section import section
from cache.control.schedule import CRON, GRACE_S, TIMEZONE, Schedule

BACK_OFF = 2.0


@section
class Timetable:
    """Schedule of generations, above the file's sections."""

    FROM_ENVIRONMENT: ClassVar[tuple[str, ...] | None] = (
        "schedule",
        "timezone",
        "schedule_grace_s",
    )

    schedule: str = CRON
    """Cron (five fields) of the DAG `nightly_precompute`; the service expects a generation after each of its ticks."""
    timezone: str = TIMEZONE
    """IANA name of the zone that the cron is in. Skipped and repeated local times are due as Airflow has them."""
    schedule_grace_s: float = GRACE_S
    """Seconds that a generation may take after its tick before it counts as missing; 0 to 31,622,400 (366 days)."""

    def __post_init__(self) -> None:
        self.nights()

    def nights(self) -> Schedule:
        """Schedule by which generations should exist."""
        return Schedule(self.schedule, self.timezone, self.schedule_grace_s)

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> "Timetable":
        """The timetable of the file that LARDER_CONFIG names, below the environment."""
        from cache.config.reading import ConfigFile, read

        file = ConfigFile.named(environ)
        return read(cls, file.above(cls), file, environ)


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
        from cache.config.reading import ConfigFile, read

        file = ConfigFile.named(environ)
        return read(cls, file.section("dag"), file, environ, table="dag")

    def defaults(self) -> dict[str, Any]:
        """Airflow's `default_args` of all tasks."""
        return {
            "retries": self.retries,
            "retry_delay": timedelta(seconds=self.retry_delay_s),
            "retry_exponential_backoff": BACK_OFF,
            "max_retry_delay": timedelta(seconds=self.retry_delay_max_s),
            "execution_timeout": timedelta(seconds=self.timeout_s),
        }
