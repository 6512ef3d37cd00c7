"""Run one night through the DAG's own callables, at a tick of its own schedule; in a process of its own."""

import json
import sys
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pendulum
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowSkipException
from airflow.timetables.trigger import CronTriggerTimetable

ORDER = (
    "embed_items", "score_shard", "assemble", "build_index", "quantize", "load", "verify", "publish", "warm", "retire",
)  # fmt: skip


def night(dag: Any, run_after: datetime) -> dict[str, Any]:
    """Run one night by calling each task's function as Airflow would; return what `begin` returned."""
    calls = {task.task_id: task.python_callable for task in dag.tasks}
    context = {
        "params": {"data_until": None}, "run_id": f"scheduled__{run_after.isoformat()}",
        "dag_run": SimpleNamespace(run_after=run_after),
    }  # fmt: skip
    for call in calls.values():
        call.__globals__["get_current_context"] = lambda: context
    taken = calls["take_events"]() if "take_events" in calls else {}
    try:
        build: dict[str, Any] = calls["begin"](taken)
    except AirflowSkipException as skipped:
        return {"generation": f"skipped: {skipped}"}
    result_by_task: dict[str, Any] = {}
    for name in ORDER:
        if name == "score_shard":
            result_by_task[name] = [calls[name](build, shard) for shard in calls["plan"](build)]
        elif name == "publish":
            result_by_task[name] = calls[name](result_by_task["verify"])
        else:
            result_by_task[name] = calls[name]() if name == "retire" else calls[name](build)
    return build


def main(folder: str, after: str) -> None:
    """Print the tick and the generation of the run at the first tick after a moment."""
    bag = DagBag(dag_folder=folder)
    dag = bag.dags["nightly_precompute"]
    nights = dag.get_task("begin").python_callable.__globals__["NIGHTS_TIMETABLE"]
    timetable = CronTriggerTimetable(nights.cron, timezone=nights.timezone)
    tick = timetable._get_next(pendulum.instance(datetime.fromisoformat(after).astimezone(UTC)))
    print(json.dumps([tick.isoformat(), night(dag, tick)["generation"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
