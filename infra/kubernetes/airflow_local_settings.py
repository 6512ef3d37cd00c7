"""Airflow's cluster policy for KubernetesExecutor: scoring tasks run in a pod with a GPU.

Airflow imports a module of this name: copy it to $AIRFLOW_HOME/config, or put its folder on PYTHONPATH, where DAG files
are parsed. Image, volumes and environment (LARDER_CONFIG, LARDER_ARTIFACTS, REDIS_URL) come from `pod_template_file`
of the section [kubernetes_executor]; the override adds a GPU's requirements.
"""

import os
from typing import Any

from kubernetes.client import models

__all__ = ["task_policy"]

SCORE_QUEUE = os.environ.get("LARDER_SCORE_QUEUE") or "gpu"
GPU_RESOURCE = "nvidia.com/gpu"
"""Resource that NVIDIA's device plug-in offers, and the taint that keeps other pods off."""


def make_gpu_pod() -> models.V1Pod:
    """Return a pod with one GPU, on a node whose taint keeps other pods off; its memory is not overcommitted."""
    container = models.V1Container(
        name="base",  # the one of the template that runs the task
        resources=models.V1ResourceRequirements(
            requests={"cpu": "4", "memory": "16Gi", GPU_RESOURCE: "1"}, limits={"memory": "16Gi", GPU_RESOURCE: "1"}
        ),
    )
    toleration = models.V1Toleration(key=GPU_RESOURCE, operator="Exists", effect="NoSchedule")
    return models.V1Pod(
        metadata=models.V1ObjectMeta(labels={"larder/queue": SCORE_QUEUE}),
        spec=models.V1PodSpec(containers=[container], tolerations=[toleration]),
    )


def task_policy(task: Any) -> None:
    """Set the pod of scoring tasks; Airflow calls it with each task of each DAG that it parses."""
    if task.queue != SCORE_QUEUE:
        return
    executor_config = {**task.executor_config, "pod_override": make_gpu_pod()}
    if task.is_mapped:
        task.partial_kwargs["executor_config"] = executor_config
    else:
        task.executor_config = executor_config
