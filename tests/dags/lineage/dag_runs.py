"""Runs the night's DAG in this process once for each cut, as `airflow dags test` does; started by tests only.

Prints the tasks' states of each run, as JSON in a line that begins with `states`.
"""

import json
import sys
from collections.abc import Sequence

from airflow.dag_processing.dagbag import DagBag

from infra.local.airflow import DAGS_FOLDER

STATES_PREFIX = "states "


def main(cuts: Sequence[str]) -> None:
    """Run one DAG run after the other, whatever the outcome of the one before."""
    dag = DagBag(dag_folder=str(DAGS_FOLDER / "nightly_precompute.py")).dags["nightly_precompute"]
    for cut in cuts:
        run = dag.test(run_conf={"data_until": cut})
        states = {task_instance.task_id: str(task_instance.state) for task_instance in run.get_task_instances()}
        print(STATES_PREFIX + json.dumps(states), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
