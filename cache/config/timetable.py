"""Timetable of generations: what the night's DAG and the service read of `larder.toml` alike."""

from collections.abc import Mapping
from typing import ClassVar

from cache.config.section import section
from cache.control.schedule import CRON, GRACE_S, TIMEZONE, Schedule


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
