"""Prints the pod that KubernetesExecutor would start for each task of a DAGs folder; run in a process of its own.

Tasks take the way of production: parsed, written as JSON and read again, then merged with a template by the provider.
"""

import json
import sys
from typing import Any

from airflow.dag_processing.dagbag import DagBag
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from airflow.serialization.serialized_objects import DagSerialization

TEMPLATE = {
    "metadata": {"name": "template", "labels": {"team": "larder"}},
    "spec": {
        "containers": [
            {
                "name": "base",
                "image": "larder-airflow",
                "env": [{"name": "LARDER_CONFIG", "value": "/data/larder.toml"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "resources": {"requests": {"memory": "2Gi"}},
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "restartPolicy": "Never",
    },
}


def pod_of(task: Any) -> Any:
    """Return the pod as JSON, with the names of the Kubernetes API."""
    built = PodGenerator.construct_pod(
        dag_id=task.dag_id,
        task_id=task.task_id,
        pod_id="pod",
        try_number=1,
        kube_image="larder-airflow",
        date=None,
        args=["run"],
        pod_override_object=PodGenerator.from_obj(task.executor_config),
        base_worker_pod=PodGenerator.deserialize_model_dict(TEMPLATE),
        namespace="default",
        scheduler_job_id="1",
    )
    return PodGenerator.serialize_pod(built)


def main(folder: str) -> None:
    """Print one JSON object: DAG -> task -> its queue and pod."""
    tasks_by_dag = {}
    for dag in DagBag(dag_folder=folder).dags.values():
        dag_json = json.dumps(DagSerialization.to_dict(dag))
        tasks = DagSerialization.from_dict(json.loads(dag_json)).tasks
        tasks_by_dag[dag.dag_id] = {task.task_id: {"queue": task.queue, "pod": pod_of(task)} for task in tasks}
    print(json.dumps(tasks_by_dag))


if __name__ == "__main__":
    main(sys.argv[1])
