import json
import os
import subprocess
import sys
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import pytest

from cache.config.timetable import NIGHT_STAGES

ROOT = Path(__file__).parents[2]


CONFIG = """
[dag]
retries = 4
retry_delay_s = 3.5
retry_delay_max_s = 120.0
load_timeout_s = 7200.0
verify_timeout_s = 9000.0
score_timeout_s = 5000.0
"""


def in_airflow(home: Path, *arguments: str, **environment: str) -> str:
    """Run this Python with an empty Airflow home and return what it prints."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The DAGs folder as Airflow sees it."""
    describe = Path(__file__).with_name("describe.py")
    home = tmp_path_factory.mktemp("airflow")
    path, with_events, by_canary = (home / f"{name}.toml" for name in ("larder", "events", "canary"))
    path.write_text(CONFIG)
    with_events.write_text("[events]\nenabled = true\n")
    by_canary.write_text('[dag]\npublish = "canary"\nload_timeout_s = 7200.0\n')
    configs = [str(with_events), str(by_canary)]
    printed = in_airflow(home, str(describe), str(ROOT / "dags"), *configs, LARDER_CONFIG=str(path))
    dags_document = json.loads(printed.splitlines()[-1])
    under = dags_document["under"]
    return {**dags_document, "with events": under[str(with_events)], "by canary": under[str(by_canary)]}


@pytest.fixture(scope="module")
def night(parsed: Any) -> Any:
    """The nightly DAG."""
    return parsed["dags"]["nightly_precompute"]


def test_every_file_parses(parsed: Any) -> None:
    assert parsed["errors"] == {}
    assert set(parsed["dags"]) == {"canary", "nightly_precompute", "roll_back", "train_reference"}


def test_parsing_imports_nothing_heavy(parsed: Any) -> None:
    # Every task parses its file again, so a second here costs a second in every task.
    assert parsed["heavy"] == []


def test_only_what_is_verified_can_be_published(night: Any) -> None:
    publish = night["tasks"]["publish"]

    assert publish["upstream"] == ["verify"]
    assert publish["trigger_rule"] == "all_success"


def test_the_night_goes_through_its_steps_in_order(night: Any) -> None:
    ids = {"score": "score_shard", "index": "build_index"}
    stages = [[ids.get(name, name) for name in stage] for stage in NIGHT_STAGES]

    for stage, following in pairwise(stages):
        for earlier, later in product(stage, following):
            assert earlier in night["tasks"][later]["all_upstream"], f"{earlier} before {later}"
    assert set(night["tasks"]["load"]["upstream"]) >= {"build_index", "quantize"}
    assert "build_index" not in night["tasks"]["quantize"]["all_upstream"]
    assert set(night["tasks"]) == {"plan", *chain.from_iterable(stages)}


def test_a_night_may_end_with_a_canary(parsed: Any) -> None:
    tasks = parsed["by canary"]["nightly_precompute"]["tasks"]

    assert "try_as_canary" not in parsed["dags"]["nightly_precompute"]["tasks"]
    assert tasks["choose"]["upstream"] == ["verify"]
    assert set(tasks["publish"]["upstream"]) == {"verify", "choose"}
    assert tasks["try_as_canary"]["upstream"] == ["choose"]
    assert set(tasks["retire"]["upstream"]) == {"warm", "try_as_canary"}
    assert tasks["retire"]["trigger_rule"] == "none_failed"


def test_a_canary_may_take_as_long_as_a_load(parsed: Any) -> None:
    tasks = parsed["by canary"]["canary"]["tasks"]

    assert {tasks[name]["timeout_s"] for name in ("start", "conclude")} == {7200.0}


def test_events_are_taken_over_before_the_night_where_they_are_enabled(parsed: Any) -> None:
    tasks = parsed["with events"]["nightly_precompute"]["tasks"]

    assert "take_events" not in parsed["dags"]["nightly_precompute"]["tasks"]
    assert tasks["begin"]["upstream"] == ["take_events"]
    assert tasks["take_events"]["upstream"] == []
    assert tasks["take_events"]["retries"] == tasks["begin"]["retries"]


def test_every_task_is_retried_and_cannot_hang(parsed: Any) -> None:
    for dag in parsed["dags"].values():
        for name, task in dag["tasks"].items():
            assert task["retries"] >= 1, name
            assert task["timeout_s"] is not None, name
            assert 0 < task["timeout_s"] <= 4 * 3600, name


def test_tries_and_their_time_limits_are_those_of_the_configuration(night: Any) -> None:
    timeout_by_task = {name: task["timeout_s"] for name, task in night["tasks"].items()}

    assert {timeout_by_task[name] for name in ("load", "publish")} == {7200.0}
    assert (timeout_by_task["verify"], timeout_by_task["score_shard"], timeout_by_task["begin"]) == (
        9000.0,
        5000.0,
        3600.0,
    )
    for task in night["tasks"].values():
        assert (task["retries"], task["back_off"]) == (4, 2.0)
        assert (task["retry_delay_s"], task["retry_delay_max_s"]) == (3.5, 120.0)


def test_only_what_the_same_inputs_would_do_again_is_final(night: Any) -> None:
    for name, task in night["tasks"].items():
        assert task["final"] == ["BundleError", "ConfigError", "Refused", "SourceError"], name


def test_scoring_is_mapped_and_waits_in_the_gpu_pool_and_queue(night: Any) -> None:
    assert night["tasks"]["score_shard"]["mapped"]
    for name in ("embed_items", "score_shard"):
        assert (night["tasks"][name]["pool"], night["tasks"][name]["queue"]) == ("gpu", "gpu")


def test_one_night_at_a_time_on_schedule_or_for_a_new_bundle(parsed: Any, night: Any) -> None:
    assert night["schedule"] == "AssetOrTimeSchedule"
    assert night["max_active_runs"] == 1
    assert not night["catchup"]
    assert parsed["dags"]["train_reference"]["tasks"]["train"]["outlets"] == ["larder_bundle"]


def test_a_rollback_is_started_by_hand_and_names_its_generation(parsed: Any) -> None:
    roll_back = parsed["dags"]["roll_back"]

    assert roll_back["schedule"] == "NullTimetable"
    assert "generation" in roll_back["params"]


def test_a_canary_waits_without_a_worker_and_is_judged_only_after_that(parsed: Any) -> None:
    canary = parsed["dags"]["canary"]

    assert canary["schedule"] == "NullTimetable" and canary["max_active_runs"] == 1
    assert {"generation", "percent"} <= set(canary["params"])
    assert canary["tasks"]["wait"]["reschedules"]
    assert set(canary["tasks"]["conclude"]["upstream"]) == {"start", "wait"}
    assert canary["tasks"]["conclude"]["trigger_rule"] == "all_success"


def test_every_dag_carries_its_operators_page(parsed: Any) -> None:
    for name, dag in parsed["dags"].items():
        assert dag["doc"], name
        assert len(dag["doc"].splitlines()) > 5, name


def test_the_celery_executor_can_be_imported(tmp_path: Path) -> None:
    # celery 5.7.0 breaks this import although its metadata allows it.
    path = "airflow.providers.celery.executors.celery_executor"

    assert in_airflow(tmp_path, "-c", f"import {path} as m; print(m.CeleryExecutor.__name__)")
