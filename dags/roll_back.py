"""Move readers back to an earlier generation, within seconds and without changing any data.

When to run it: trigger it when a published generation turns out to be bad. `generation` is the one to
go back to, and may be empty for the newest superseded one; `reason` is kept in the release record.
Only a verified generation that has not been removed can be chosen: `larder status` lists them. The
generation that was live is marked as rolled back and is never used as a fallback again.

The DAG needs LARDER_CONFIG, LARDER_ARTIFACTS and REDIS_URL where tasks run. It does not stop a running
`nightly_precompute`, which publishes when it is done: pause it first if it builds from the same bad
inputs.
"""

from datetime import timedelta
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task


@dag(
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        "generation": Param(None, type=["null", "string"], title="Generation to go back to"),
        "reason": Param("rolled back by hand", type="string", minLength=1, title="Why"),
    },
    default_args={"retries": 2, "retry_delay": timedelta(seconds=5), "execution_timeout": timedelta(minutes=5)},
    doc_md=__doc__,
    tags=["larder"],
)
def roll_back() -> None:
    @task(multiple_outputs=False)
    def move_pointer() -> dict[str, Any]:
        """Make the chosen generation live; a retry recognises its own move of the pointer by the run id."""
        from precompute.config.settings import night_config
        from precompute.releases import recovery

        context = get_current_context()
        return recovery.roll_back(
            night_config(),
            target_generation=context["params"]["generation"],
            reason=context["params"]["reason"],
            attempt=context["run_id"],
        )

    move_pointer()


roll_back()
