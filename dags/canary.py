"""Try a verified generation on a share of the requests, then publish or abandon it by what was measured.

What it does: start ▶ wait ▶ conclude. Readers whose canary key falls into the share are answered
from the new generation, whole requests at a time; all others from the live one. After `wait_s` of
the section [canary] both arms are compared: requests answered, mix of sources, top scores and, if
`feedback_event` names one, what callers reported to POST /v1/feedback. While too little was counted
to tell, `wait` goes on, up to `wait_max_s`.

When to run it: by hand or from another DAG, on a generation that is verified and not yet published,
such as one built by the single steps `larder begin` to `verify`, or one whose night was
stopped before `publish`. `generation` may stay empty for the newest verified one, `percent` for the
one of the settings.

Reading a run: `conclude` green means that the generation is live for everybody. `conclude` red means
that it was abandoned (Refused): the log names each measure, its value and its limit, readers have the
live generation only, and there is no retry, since the same numbers would say the same; or that nothing
could be told (Conflict): the canary still runs, to be published or abandoned by hand, and clearing
`conclude` compares once more. `wait` looks once a minute and holds no worker in between; it ends early
when somebody published, rolled back or abandoned.

To end a canary by hand: `larder canary abandon --reason ...`. It needs LARDER_CONFIG,
LARDER_ARTIFACTS and REDIS_URL where tasks run.
"""

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import ExceptionRetryPolicy, Param, RetryAction, RetryRule, dag, get_current_context, task

from cache.config.timetable import DagConfig
from cache.errors import ConfigError, Refused

LIMITS = DagConfig.configured(os.environ)
FINAL = RetryRule(
    exception=[ConfigError, Refused], action=RetryAction.FAIL, reason="the same question would be answered the same"
)
CANARY_TIME_MAX = timedelta(days=2)
"""The most that `wait_s` and `wait_max_s` may come to; a canary left running longer than this is a red task."""


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
        # Both may have to read every page back, beside readers: where a Redis has started since `verify`.
        "execution_timeout": timedelta(seconds=LIMITS.load_timeout_s),
    },
    doc_md=__doc__,
    tags=["larder"],
)
def canary() -> None:
    @task(multiple_outputs=False)
    def start() -> dict[str, Any]:
        """Wait until replicas hold it ready, then give it its share; a retry finds its own start."""
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
    def wait(started: dict[str, Any]) -> bool:
        """Look whether the canary has run long enough, or was ended."""
        from precompute.config.settings import night_config
        from precompute.traffic.canary import trial as steps

        return steps.is_over(night_config(), started["generation"])

    @task(multiple_outputs=False)
    def conclude(started: dict[str, Any]) -> dict[str, Any]:
        """Compare both arms; publish, or abandon and fail."""
        from precompute.config.settings import night_config
        from precompute.traffic.canary import trial as steps

        attempt = get_current_context()["run_id"]
        return steps.publish_or_abandon(night_config(), started["generation"], attempt=attempt)

    started = start()
    wait(started) >> conclude(started)


canary()
