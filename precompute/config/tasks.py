"""Retries and time limits of the night's DAG. Imports nothing heavy: every task parses its DAG file again."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Self

from cache.control.schedule import read_settings
from cache.errors import ConfigError
from precompute.config.validation import check_above_zero, check_range, check_types

BACK_OFF = 2.0


@dataclass(frozen=True, slots=True)
class DagConfig:
    """Retries and time limits of the tasks of the DAG `nightly_precompute`.

    A failed try is followed by up to `retries` more: `retry_delay_s` later, then twice as long, up to
    `retry_delay_max_s`. One try may take `timeout_s`; scoring one shard `score_timeout_s`; `load` and `publish`, and
    `verify`, whose time grows with the bytes of a generation, `load_timeout_s` and `verify_timeout_s`. What a try that
    was cut off has loaded, or read back, the next one does not do again.
    """

    retries: int = 5
    retry_delay_s: float = 10.0
    retry_delay_max_s: float = 600.0
    timeout_s: float = 3600.0
    score_timeout_s: float = 10_800.0
    load_timeout_s: float = 14_400.0
    verify_timeout_s: float = 14_400.0

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "retries", 0)
        check_above_zero(
            self,
            *(each.name for each in fields(self) if each.name.endswith("_s")),
        )

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> Self:
        """The section [dag] of the file that LARDER_CONFIG names; LARDER_RETRY_DELAY_S wins over it."""
        section = read_settings(environ).get("dag", {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"[dag] is a section, not {section!r}", field="dag")
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(section) - known):
            raise ConfigError(
                f"[dag] has no setting {unknown[0]!r}; known are {', '.join(sorted(known))}",
                field=unknown[0],
            )
        found = cls(**section)
        if delay := environ.get("LARDER_RETRY_DELAY_S"):
            try:
                return replace(found, retry_delay_s=float(delay))
            except ValueError as error:
                raise ConfigError(
                    f"LARDER_RETRY_DELAY_S is a number of seconds, not {delay!r}",
                    field="LARDER_RETRY_DELAY_S",
                ) from error
        return found

    def defaults(self) -> dict[str, Any]:
        """Airflow's `default_args` of all tasks."""
        return {
            "retries": self.retries,
            "retry_delay": timedelta(seconds=self.retry_delay_s),
            "retry_exponential_backoff": BACK_OFF,
            "max_retry_delay": timedelta(seconds=self.retry_delay_max_s),
            "execution_timeout": timedelta(seconds=self.timeout_s),
        }
