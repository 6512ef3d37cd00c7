"""The pods of KubernetesExecutor, without a cluster: what the provider would send to one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dags.test_parse import ROOT, in_airflow

GPU = "nvidia.com/gpu"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Queue and pod of each task, by DAG and task, with our policy where Airflow looks for one."""
    home = tmp_path_factory.mktemp("airflow")
    (home / "config").mkdir()
    shutil.copy(ROOT / "infra/kubernetes/airflow_local_settings.py", home / "config")
    script = Path(__file__).with_name("pods.py")
    tasks_by_dag = json.loads(in_airflow(home, str(script), str(ROOT / "dags")).splitlines()[-1])
    return {(dag, name): task for dag, dag_tasks in tasks_by_dag.items() for name, task in dag_tasks.items()}


def test_what_scores_gets_a_gpu_and_nothing_else_does(tasks: Any) -> None:
    with_gpu = {
        name
        for name, task in tasks.items()
        if GPU in task["pod"]["spec"]["containers"][0]["resources"].get("limits", {})
    }

    scoring = ("embed_items", "score_shard")
    assert with_gpu == {("nightly_precompute", task_id) for task_id in scoring}
    assert with_gpu == {name for name, task in tasks.items() if task["queue"] == "gpu"}


def test_a_gpu_is_requested_as_it_is_limited_and_its_taint_is_tolerated(tasks: Any) -> None:
    spec = tasks["nightly_precompute", "score_shard"]["pod"]["spec"]
    resources = spec["containers"][0]["resources"]

    # Kubernetes refuses a pod whose requests and limits of an extended resource differ.
    assert resources["requests"][GPU] == resources["limits"][GPU] == "1"
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "16Gi"
    assert spec["tolerations"] == [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]


def test_what_the_template_says_stays(tasks: Any) -> None:
    pod = tasks["nightly_precompute", "score_shard"]["pod"]
    (container,) = pod["spec"]["containers"]

    assert (container["name"], container["image"]) == ("base", "larder-airflow")
    assert {"name": "LARDER_CONFIG", "value": "/data/larder.toml"} in container["env"]
    assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["metadata"]["labels"].items() >= {"team": "larder", "larder/queue": "gpu"}.items()
