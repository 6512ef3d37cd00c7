"""Score everything and publish one generation, every night and whenever a new model bundle arrives.

Tasks: begin ▶ embed items ▶ score each shard ▶ assemble ▶ index and quantize ▶ load into Redis ▶ verify ▶ publish ▶
warm ▶ retire. Readers see the whole change at once, at `publish`.

When it runs: at 03:00 UTC (`schedule` and `timezone` of LARDER_CONFIG, or LARDER_SCHEDULE and LARDER_TIMEZONE; the
service reads the same settings and reports a missing generation) and on every event of the asset `larder_bundle`; one
run at a time. You can also trigger it with `data_until` (ISO 8601), the cut of the data. Without `data_until`, the cut
is that of the configuration, else the time at which the run was due. Data from the cut on is left out, so a late start
changes nothing. `begin` refuses a cut in the future, or one older than that of the live generation.

What it needs: LARDER_CONFIG, LARDER_ARTIFACTS and REDIS_URL where tasks run, and a pool `gpu`:
    airflow pools set gpu 2 "scoring tasks"
Without the pool, scoring tasks stay `scheduled` for ever, without any message. With CeleryExecutor, a worker must
listen to the queue `gpu` (LARDER_SCORE_QUEUE sets another queue); LocalExecutor ignores queues; for KubernetesExecutor,
infra/kubernetes gives the pods of that queue a GPU.

Reading a run:
- `begin` green, all other tasks skipped: this generation is already live.
- `begin` skipped as well: the live generation is newer than the time of the run, for example because a night was
  triggered earlier that day; the log of `begin` says so.
- `begin` red with "was rolled back": the night would hold the same as a rolled-back generation. Correct the files or
  the model, then clear `begin`; the log has the commands that return to that generation. There is no retry.
- `verify` red with "is refused": a gate failed. The log names the rule, the value, the threshold and, if the rule can
  be overridden, the command `override`; after it, clear `verify`. A retry would have the same result, so there is none.
- `verify` red with "could not be judged": Redis, the store or a disk did not answer in any try. Nothing is refused;
  clear the task when they work again. In both cases, readers still have the last generation.
- `publish` red with "verified against": another generation went live in the meantime; clear `verify`, and `publish`
  follows.

A failed task is retried five times with growing pauses (10 s, doubled, up to 10 min), unless the same inputs would fail
again. The section [dag] of LARDER_CONFIG sets the number of retries and the time limit of a try. `load` and `verify`
continue where the last try was interrupted. Any task may be cleared and run again: a generation's id is computed from
its inputs, so tasks find their earlier work. If `[events]` is enabled, the task `take_events` runs before `begin` and
determines the last event that the night reads: if it is cleared, it may read more events, and `begin` then starts
another generation. `begin` and `load` remove older generations that were never published; `larder pin` keeps one.

With `[dag] publish = "canary"` a night ends with `try_as_canary` instead of `publish`: it triggers the DAG `canary`,
which must be unpaused. `choose` sends the first generation to `publish`, because there is no live one to compare with.

To undo a publish, use the DAG `roll_back`.
"""

import os
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import (
    Asset,
    AssetOrTimeSchedule,
    CronTriggerTimetable,
    ExceptionRetryPolicy,
    Param,
    RetryAction,
    RetryRule,
    chain,
    dag,
    get_current_context,
    task,
)
from airflow.sdk.exceptions import AirflowSkipException

from cache.config.events import EventsConfig
from cache.config.timetable import NIGHT_STAGES, DagConfig, Timetable
from cache.errors import BundleError, ConfigError, Refused, SourceError

if TYPE_CHECKING:  # importing these at run time would load numpy whenever the DAG file is parsed
    from precompute.builds.reports import BegunBuild
    from precompute.partitions.night_input import TakenEvents
    from precompute.steps.score import ShardResult

NIGHTS_TIMETABLE = Timetable.configured(os.environ).nights()
DAG_CONFIG = DagConfig.configured(os.environ)
EVENTS_CONFIG = EventsConfig.configured(os.environ)
SCORE_QUEUE = os.environ.get("LARDER_SCORE_QUEUE") or "gpu"

FINAL_RULE = RetryRule(
    exception=[BundleError, ConfigError, Refused, SourceError],
    action=RetryAction.FAIL,
    reason="the same inputs would fail again",
)


def run_step(step_name: str, *arguments: Any, **named_arguments: Any) -> dict[str, Any]:
    """Run a step of `precompute.steps` and return its result; imported here so that parsing DAGs does not load it."""
    from cache.control.store_problems import demand_own_store
    from precompute.builds.night_failure import forget_failure, note_failure_of_step
    from precompute.config.settings import night_config

    config, run_step_module = night_config(), import_module(f"precompute.steps.{step_name}").run
    demand_own_store(config, config.redis_url, config.redis_timeout_s)  # it records its own failure
    generation = arguments[0]["generation"] if arguments else None
    with note_failure_of_step(config, step_name, generation):
        step_result: dict[str, Any] = run_step_module(config, *arguments, **named_arguments)
    if step_name == "retire" or step_result.get("already_live"):  # the night is done
        forget_failure(config)
    return step_result


@dag(
    schedule=AssetOrTimeSchedule(
        assets=Asset("larder_bundle"),
        timetable=CronTriggerTimetable(NIGHTS_TIMETABLE.cron, timezone=NIGHTS_TIMETABLE.timezone),
    ),
    catchup=False,
    max_active_runs=1,
    params={"data_until": Param(None, type=["null", "string"], format="date-time")},
    default_args={**DAG_CONFIG.default_task_arguments(), "retry_policy": ExceptionRetryPolicy(rules=[FINAL_RULE])},
    doc_md=__doc__,
    tags=["larder"],
)
def nightly_precompute() -> None:
    @task(multiple_outputs=False)
    def take_events() -> dict[str, Any]:
        """Write the stream's new events into the store; a retry of `begin` reads up to the same event."""
        return run_step("take_events")

    @task.short_circuit(multiple_outputs=False)
    def begin(taken_events: "TakenEvents | dict[str, Any]") -> "BegunBuild | dict[str, Any]":
        """Name the generation and partition the sources; return {} if it is live, which skips the other tasks."""
        context = get_current_context()
        # Asset-triggered runs have no logical date; `run_after` is the same in all retries.
        result = run_step(
            "begin",
            data_until=context["params"]["data_until"],
            run_after=context["dag_run"].run_after.isoformat(),
            events_until=taken_events.get("events_until"),
        )
        build = cast("BegunBuild", result)
        if nothing_newer := build.get("nothing_newer"):
            raise AirflowSkipException(nothing_newer)
        return {} if build["already_live"] else build

    @task
    def plan(build: "BegunBuild") -> list[int]:
        """Return the shards: a separate task, because Airflow maps over the whole result of a task."""
        return build["shards"]

    @task(multiple_outputs=False, pool="gpu", queue=SCORE_QUEUE)
    def embed_items(build: "BegunBuild") -> dict[str, Any]:
        """Run the item tower over the catalogue, once for all shards."""
        return run_step("embed_items", build)

    # The ids of this task and of `build_index` differ from their steps' names, so that Airflow's history stays usable.
    @task(
        task_id="score_shard",
        multiple_outputs=False,
        pool="gpu",
        queue=SCORE_QUEUE,
        execution_timeout=timedelta(seconds=DAG_CONFIG.score_timeout_s),
        map_index_template="shard {{ task.op_kwargs['shard'] }}",
    )
    def score(build: "BegunBuild", shard: int) -> "ShardResult":
        """Score one hash shard and write its pages."""
        from precompute.builds.night_failure import note_failure_of_step
        from precompute.config.settings import night_config
        from precompute.steps import score

        with note_failure_of_step(config := night_config(), f"score, shard {shard}", build["generation"]):
            return score.run_shard(config, build, shard)

    @task(multiple_outputs=False)
    def assemble(build: "BegunBuild") -> dict[str, Any]:
        """Check that all shards were scored."""
        return run_step("assemble", build)

    @task(task_id="build_index", multiple_outputs=False)
    def index(build: "BegunBuild") -> dict[str, Any]:
        """Build the FAISS indexes and measure their recall."""
        return run_step("index", build)

    @task(multiple_outputs=False)
    def quantize(build: "BegunBuild") -> dict[str, Any]:
        """Make the int8 towers and measure their agreement."""
        return run_step("quantize", build)

    @task(multiple_outputs=False, execution_timeout=timedelta(seconds=DAG_CONFIG.load_timeout_s))
    def load(build: "BegunBuild") -> dict[str, Any]:
        """Stream the pages into Redis, in addition to those of the live generation."""
        return run_step("load", build)

    @task(multiple_outputs=False, execution_timeout=timedelta(seconds=DAG_CONFIG.verify_timeout_s))
    def verify(build: "BegunBuild") -> dict[str, Any]:
        """Judge the generation by every gate; if one fails, the task fails and nothing is published."""
        return run_step("verify", build, attempt=get_current_context()["run_id"])

    @task(multiple_outputs=False, execution_timeout=timedelta(seconds=DAG_CONFIG.load_timeout_s))
    def publish(verify_report: dict[str, Any]) -> dict[str, Any]:
        """Move the pointer; a retry recognises its own publish by the run id."""
        return run_step("publish", verify_report, attempt=get_current_context()["run_id"])

    @task.branch
    def choose() -> str:
        """Choose `publish` if no generation is live to compare with, else `try_as_canary`."""
        from precompute.config.settings import night_config
        from precompute.traffic.canary.trial import has_live

        return "try_as_canary" if has_live(night_config()) else "publish"

    @task(multiple_outputs=False)
    def warm(build: "BegunBuild") -> dict[str, Any]:
        """Wait until the replicas have switched to the generation."""
        return run_step("warm", build)

    @task(multiple_outputs=False, trigger_rule="none_failed" if DAG_CONFIG.publish == "canary" else "all_success")
    def retire() -> dict[str, Any]:
        """Remove generations that are no longer needed."""
        return run_step("retire", attempt=get_current_context()["run_id"])

    build = begin(take_events() if EVENTS_CONFIG.enabled else {})
    verified = verify(build)
    tasks = {
        "begin": build,
        "embed_items": embed_items(build),
        "score": score.partial(build=build).expand(shard=plan(build)),
        "assemble": assemble(build),
        "index": index(build),
        "quantize": quantize(build),
        "load": load(build),
        "verify": verified,
        "publish": publish(verified),
        "warm": warm(build),
        "retire": retire(),
    }
    stages = [[tasks[name] for name in stage] for stage in NIGHT_STAGES]
    chain(*(stage if len(stage) > 1 else stage[0] for stage in stages))
    if DAG_CONFIG.publish == "canary":
        from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator

        try_as_canary = TriggerDagRunOperator(
            task_id="try_as_canary",
            trigger_dag_id="canary",
            # With this run id, a retry finds the run that the first try triggered.
            trigger_run_id="{{ run_id }}",
            skip_when_already_exists=True,
            conf={"generation": "{{ ti.xcom_pull(task_ids='verify')['generation'] }}"},
        )
        verified >> choose() >> [tasks["publish"], try_as_canary]
        try_as_canary >> tasks["retire"]


nightly_precompute()
