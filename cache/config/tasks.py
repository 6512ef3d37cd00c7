"""Retries and time limits of the night's DAG. Imports nothing heavy: every task parses its DAG file again."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveFloat

from cache.config.section import section

BACK_OFF = 2.0


@section
class DagConfig:
    """Retries and time limits of the tasks of the DAG `nightly_precompute`, in `[dag]`.

    What a try that was cut off has loaded, or read back, the next one does not do again.
    """

    FROM_ENVIRONMENT: ClassVar = ("retry_delay_s",)

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
    """Seconds that one try of `load` or `publish` may take; beside readers a load takes up to its bytes at
    `[governor] floor_mib_s` (16 MiB/s: 230 GB in 4 hours)."""
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
