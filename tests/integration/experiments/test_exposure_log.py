"""What a replica writes down of an experiment: exact once it has stopped, one file, and without who was erased."""

import argparse
import io
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import orjson
import pyarrow.parquet as pq
import pytest

from cache.traffic.experiments import latest_experiments
from infra.local.service import ServiceProcess
from precompute.cli.parser import build_command_parser
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.steps import retire
from precompute.traffic import experiments
from precompute.traffic.experiments import ArmOption, ExperimentOption
from precompute.traffic.exposures import gather_exposures
from tests.integration.experiments.arms import arms
from tests.integration.fleet import control_of, fleet
from tests.integration.nights import histories

KEYS = [f"key-{number}" for number in range(60)]


def run(config: NightConfig, *command_parts: str) -> Any:
    arguments: argparse.Namespace = build_command_parser().parse_args([*command_parts, "--json"])
    return arguments.run.import_command()(config, arguments, quiet)


def rows(config: NightConfig) -> list[dict[str, Any]]:
    """All rows of all files of the experiment."""
    store, exposure_rows = config.store(), []
    for name in store.names("exposures/ranker"):
        if name.endswith(".parquet"):
            raw = store.read(f"exposures/ranker/{name}")
            exposure_rows += pq.read_table(io.BytesIO(raw or b"")).to_pylist()
    return exposure_rows


def test_the_log_is_exact_and_feedback_finds_its_arm(tmp_path: Path, redis_url: str) -> None:
    own_config, arm_config = arms(tmp_path / "night", redis_url)
    named = (ArmOption("control", own_config.namespace, 0.5), ArmOption("b", arm_config.namespace, 0.5))
    user = min(histories(own_config))
    with fleet(own_config, tmp_path / "logs", count=1) as (service,):
        experiments.start(own_config, ExperimentOption(own_config.namespace, "ranker", named, 0.8))
        expected, clicks = _look_up_and_click(own_config, service, user)

    status = run(own_config, "experiment", "status", "ranker")
    (experiment_status,) = status["experiments"]
    by_arm = {arm_status["arm"]: arm_status for arm_status in experiment_status["arms"]}
    requests = Counter(arm for arm in expected.values() if arm)
    assert {arm: arm_status["requests"] for arm, arm_status in by_arm.items()} == {
        arm: 3 * count for arm, count in requests.items()
    }
    assert {arm: arm_status["feedback"] for arm, arm_status in by_arm.items()} == {
        arm: {"click": count} for arm, count in clicks.items()
    }
    click_ratio = by_arm["b"]["ratios"]["click"]
    rate = {arm: clicks[arm] / (3 * requests[arm]) for arm in clicks}
    assert click_ratio["ratio"] == pytest.approx(rate["b"] / rate["control"])
    assert click_ratio["low"] < click_ratio["ratio"] < click_ratio["high"] and by_arm["control"]["ratios"] == {}

    with control_of(own_config) as control:
        at = control.time()
    assert gather_exposures(own_config.store(), gathered_at=at + 7_200)["parts"] >= 1
    assert {row["key"]: row["arm"] for row in rows(own_config)} == {key: arm for key, arm in expected.items() if arm}
    hourly_exposures = {(row["key"], row["arm"], row["at"].hour) for row in rows(own_config)}
    assert len(rows(own_config)) == len(hourly_exposures)
    assert run(own_config, "experiment", "status", "ranker")["experiments"][0] == experiment_status

    erased = next(key for key, arm in expected.items() if arm == "b")
    run(own_config, "erase", erased, "--reason", "a test")
    assert erased not in {row["key"] for row in rows(own_config)} and len(rows(own_config)) > 5
    assert "exposure_parts" in retire.run(own_config)


def _look_up_and_click(
    own_config: NightConfig, service: ServiceProcess, user: str
) -> tuple[dict[str, str | None], Counter[str]]:
    """Asks three times for each key, and reports clicks; the arm of each key, and the clicks of each arm."""
    record = latest_experiments(own_config.store())
    (experiment,) = record.running
    expected: dict[str, str | None] = {}
    clicks: Counter[str] = Counter()
    with httpx.Client(base_url=service.url) as client:
        for number, key in enumerate(KEYS):
            raw = key.encode()
            arm = experiment.owners.owner_of(raw) if record.owners.owner_of(raw) else None
            expected[key] = arm
            for _ in range(3):
                body = {"entities": [user], "canary_key": key}
                answer = client.post("/v1/lookup/user_topk", content=orjson.dumps(body))
                assert answer.json()["answers"][0].get("arm") == arm
            forced = {"entities": [user], "canary_key": f"tester-{key}", "arm": "ranker=b"}
            assert client.post("/v1/lookup/user_topk", content=orjson.dumps(forced)).status_code == 200  # fmt: skip
            feedback: dict[str, Any] = {"event": "click", "count": 2, "canary_key": key}
            if arm is not None and number % 2:
                feedback = {"event": "click", "count": 2, "arm": f"ranker={arm}"}
            feedback_answer = client.post("/v1/feedback", content=orjson.dumps(feedback)).json()
            counted_for = None if arm is None else f"ranker={arm}"
            assert feedback_answer == {"arm": counted_for} | ({} if arm is None else {"experiment": counted_for})
            if arm is not None:
                clicks[arm] += 2
        unknown_arm_feedback = {"event": "click", "arm": "ranker=nobody"}
        assert client.post("/v1/feedback", content=orjson.dumps(unknown_arm_feedback)).json() == {"arm": None}
        text = client.get("/metrics").text
    for arm, count in clicks.items():
        line = f'larder_experiment_feedback_total{{arm="{arm}",event="click",experiment="ranker"}}'
        assert f"{line} {float(count)}" in text
    return expected, clicks
