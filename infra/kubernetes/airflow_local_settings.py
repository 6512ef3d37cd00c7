"""Airflow's cluster policy for KubernetesExecutor: scoring tasks run in a pod with a GPU.

Airflow imports a module of this name: on the hosts that parse DAG files, copy it to $AIRFLOW_HOME/config or put its
folder on PYTHONPATH. Image, volumes and environment (LARDER_CONFIG, LARDER_ARTIFACTS, REDIS_URL) come from
`pod_template_file` of the section [kubernetes_executor]; the override adds the requirements of a GPU.
"""

import os
from typing import Any

from kubernetes.client import models

__all__ = ["task_policy"]

SCORE_QUEUE = os.environ.get("LARDER_SCORE_QUEUE") or "gpu"
GPU_RESOURCE = "nvidia.com/gpu"
"""Name of the resource of NVIDIA's device plug-in, and of the taint that keeps other pods off its nodes."""


def make_gpu_pod() -> models.V1Pod:
    """Return a pod override with one GPU, a toleration of the GPU nodes' taint, and memory request equal to limit."""
    container = models.V1Container(
        name="base",  # name of the container that runs the task in Airflow's template
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
    """Set the pod override of scoring tasks; Airflow calls this for each task that it parses."""
    if task.queue != SCORE_QUEUE:
        return
    executor_config = {**task.executor_config, "pod_override": make_gpu_pod()}
    if task.is_mapped:
        task.partial_kwargs["executor_config"] = executor_config
    else:
        task.executor_config = executor_config
