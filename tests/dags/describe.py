"""Parse the DAGs folder as Airflow does and print its contents; run in a process of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import RetryAction

from cache.errors import LarderError


def main(folder: str, *configs: str) -> None:
    """Print one JSON object: import errors, heavy modules that parsing pulled in, and each DAG.

    With `configs` the DAGs once more for each of these files, as parsed under it: `under` by file.
    """
    bag = DagBag(dag_folder=folder)
    heavy = ("torch", "faiss", "onnx", "onnxruntime", "pyarrow", "scipy", "numpy", "fastapi")
    heavy_imports = sorted(name for name in heavy if name in sys.modules)
    errors = {Path(name).name: error for name, error in bag.import_errors.items()}
    document: dict[str, Any] = {"errors": errors, "heavy": heavy_imports, "dags": described(bag), "under": {}}
    for config in configs:
        os.environ["LARDER_CONFIG"] = config
        document["under"][config] = described(DagBag(dag_folder=folder))
    print(json.dumps(document))


def described(bag: DagBag) -> dict[str, Any]:
    """Return what is in each DAG, by its id."""
    return {
        dag.dag_id: {
            "schedule": type(dag.timetable).__name__,
            "max_active_runs": dag.max_active_runs,
            "catchup": dag.catchup,
            "params": sorted(dag.params),
            "doc": dag.doc_md,
            "tasks": {
                task.task_id: {
                    "upstream": sorted(task.upstream_task_ids),
                    "all_upstream": sorted(task.get_flat_relative_ids(upstream=True)),
                    "retries": task.retries,
                    "retry_delay_s": task.retry_delay.total_seconds(),
                    "retry_delay_max_s": task.max_retry_delay and task.max_retry_delay.total_seconds(),
                    "back_off": task.retry_exponential_backoff,
                    "final": final(task),
                    "timeout_s": task.execution_timeout and task.execution_timeout.total_seconds(),
                    "pool": task.pool,
                    "queue": task.queue,
                    "mapped": task.is_mapped,
                    "reschedules": getattr(task, "mode", None) == "reschedule",
                    "outlets": [asset.name for asset in task.outlets],
                    "trigger_rule": task.trigger_rule.value,
                }
                for task in dag.tasks
            },
        }
        for dag in bag.dags.values()
    }


def final(task: Any) -> list[str]:
    """Return the names of the errors after which the task is not retried."""
    policy = task.retry_policy
    kinds = LarderError.__subclasses__()
    return sorted(
        kind.__name__ for kind in kinds if policy and policy.evaluate(kind("x"), 1, 5).action is RetryAction.FAIL
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
