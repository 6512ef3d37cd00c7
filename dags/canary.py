"""Try a verified generation on a share of the requests, then publish or abandon it by the measured figures.

Tasks: start ▶ wait ▶ conclude. Readers whose canary key falls into the share are answered
from the new generation, whole requests at a time; all others from the live one. After `wait_s` of
the section [canary] both arms are compared: requests answered, mix of sources, top scores and, if
`feedback_event` names an event, the feedback that callers sent to POST /v1/feedback. While there are
too few requests to decide, `wait` goes on, up to `wait_max_s`.

When to run it: trigger it manually or from another DAG, for a generation that is verified and not yet
published: one that the single steps `larder begin` to `verify` built, or one whose night was stopped
before `publish`. The parameter `generation` may be empty for the newest verified generation, `percent`
for the percentage of the settings.

Reading a run: if `conclude` is green, the generation is live for all readers. If it is red with
Refused, the canary was abandoned: the log names each measure, its value and its limit, all readers have
the live generation, and there is no retry, because the figures would be the same. If it is red with
Conflict, no decision was possible and the canary still runs: publish or abandon it yourself, or clear
`conclude` to compare again. `wait` checks once a minute and occupies no worker in between; it ends
early after a publish, a roll back or an abandonment.

To end a canary: `larder canary abandon --reason ...`. The DAG needs LARDER_CONFIG, LARDER_ARTIFACTS and
REDIS_URL where tasks run.
"""

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import ExceptionRetryPolicy, Param, RetryAction, RetryRule, dag, get_current_context, task

from cache.config.timetable import DagConfig
from cache.errors import ConfigError, Refused

LIMITS = DagConfig.configured(os.environ)
FINAL = RetryRule(
    exception=[ConfigError, Refused], action=RetryAction.FAIL, reason="a retry would have the same result"
)
CANARY_TIME_MAX = timedelta(days=2)
"""Timeout of `wait`, and so an upper bound for `wait_s` and `wait_max_s`; a longer canary fails the task."""


@dag(
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        "generation": Param(None, type=["null", "string"], title="Generation to try"),
        "percent": Param(None, type=["null", "number"], exclusiveMinimum=0, maximum=100, title="Percent"),
    },
    default_args={
        "retries": 2,
        "retry_delay": timedelta(seconds=10),
        "retry_policy": ExceptionRetryPolicy(rules=[FINAL]),
        # If Redis was restarted after `verify`, `start` and `conclude` read all pages back, slowly enough for readers.
        "execution_timeout": timedelta(seconds=LIMITS.load_timeout_s),
    },
    doc_md=__doc__,
    tags=["larder"],
)
def canary() -> None:
    @task(multiple_outputs=False)
    def start() -> dict[str, Any]:
        """Wait until replicas have loaded the generation, then give it its share; a retry recognises its own start."""
        from precompute.config.settings import night_config
        from precompute.traffic.canary import trial as steps

        context = get_current_context()
        return steps.start(
            night_config(),
            context["params"]["generation"],
            percent=context["params"]["percent"],
            attempt=context["run_id"],
        )

    @task.sensor(mode="reschedule", poke_interval=60, timeout=CANARY_TIME_MAX.total_seconds())
    def wait(start_report: dict[str, Any]) -> bool:
        """Return True if the canary has run long enough, or was ended."""
        from precompute.config.settings import night_config
        from precompute.traffic.canary import trial as steps

        return steps.is_over(night_config(), start_report["generation"])

    @task(multiple_outputs=False)
    def conclude(start_report: dict[str, Any]) -> dict[str, Any]:
        """Compare both arms; publish the generation, or abandon it and fail."""
        from precompute.config.settings import night_config
        from precompute.traffic.canary import trial as steps

        attempt = get_current_context()["run_id"]
        return steps.publish_or_abandon(night_config(), start_report["generation"], attempt=attempt)

    started = start()
    wait(started) >> conclude(started)


canary()
