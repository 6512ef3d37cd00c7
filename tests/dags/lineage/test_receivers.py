"""Nights through Airflow with its OpenLineage provider: real receivers get events, and a dead one costs no night."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache.process.redis_server import RedisServer
from infra.local.airflow import MANUAL_SCHEDULE, ROOT, local_airflow_settings
from precompute.config.settings import night_config
from precompute.reference.train import train_reference
from tests.dags.lineage.dag_runs import STATES_PREFIX
from tests.dags.lineage.receiver import receiving, silent
from tests.dags.lineage.schemas import SPEC, complaints
from tests.dags.place import CONFIG, USERS, write_interactions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("openlineage") is None, reason="the extra `lineage` is not installed"
    ),
]  # fmt: skip
RUN_S = 400.0


@dataclass
class Nights:
    """An Airflow without its servers, over a folder with data."""

    folder: Path
    environ: dict[str, str]

    def run(self, transport: Mapping[str, Any], cut: str) -> tuple[dict[str, str], float]:
        """States of the tasks of one run, with this transport for events, and its seconds."""
        started_at = time.monotonic()
        completed_process = subprocess.run(
            [sys.executable, "-m", "tests.dags.lineage.dag_runs", cut],
            env={**self.environ, "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport)},
            cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=True,
        )  # fmt: skip
        (states,) = [line for line in completed_process.stdout.splitlines() if line.startswith(STATES_PREFIX)]
        return json.loads(states.removeprefix(STATES_PREFIX)), time.monotonic() - started_at


@pytest.fixture
def nights(tmp_path: Path, own_redis: RedisServer) -> Nights:
    write_interactions(tmp_path / "interactions.csv", seed=7)
    file = tmp_path / "larder.toml"
    file.write_text(CONFIG)
    train_reference(night_config(str(file), {"REDIS_URL": own_redis.url}))
    home = tmp_path / "airflow"
    home.mkdir()
    environ = {
        **os.environ, **local_airflow_settings(home, "http://127.0.0.1:1", 1),
        "LARDER_CONFIG": str(file), "LARDER_SCHEDULE": MANUAL_SCHEDULE, "REDIS_URL": own_redis.url,
        "AIRFLOW__OPENLINEAGE__EXTRACTORS": "infra.lineage.extractor.NightExtractor",
        "AIRFLOW__OPENLINEAGE__EXECUTE_IN_THREAD": "true",
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"],
        env=environ, cwd=home, check=True, capture_output=True, timeout=RUN_S,
    )  # fmt: skip
    return Nights(tmp_path, environ)


def http(url: str) -> dict[str, Any]:
    """The transport that the documents name."""
    return {"type": "http", "url": url, "timeout": 1, "retry": {"total": 0}}


def test_receivers_get_every_step_and_a_refused_gate_as_a_failure(nights: Nights) -> None:
    file = nights.folder / "events.jsonl"
    with receiving() as receiver:
        to_file = {"type": "file", "log_file_path": str(file), "append": True}
        transport = {"type": "composite", "transports": {"a": http(receiver.url), "b": to_file}}

        # given: a night that is published, then a night from half of the users
        good, seconds = nights.run(transport, "2026-01-29T00:00:00Z")
        count = len(receiver.events)
        write_interactions(nights.folder / "interactions.csv", seed=7, users=USERS // 2)
        refused_states, _ = nights.run(transport, "2026-01-30T00:00:00Z")

    # then: both receivers have the same events, which conform to the specification if it is available here
    assert set(good.values()) == {"success"} and refused_states["verify"] == "failed"
    assert [json.loads(line) for line in file.read_text().splitlines()] == receiver.events
    if SPEC:
        assert [complaint for event in receiver.events for complaint in complaints(event)] == []
    completed_events = [event for event in receiver.events[:count] if event["eventType"] == "COMPLETE"]
    assert {event["job"]["name"].rpartition(".")[2] for event in completed_events} >= set(good)

    # and: the refused night is a failure that names rule, value and threshold
    (failed,) = [
        event
        for event in receiver.events[count:]
        if event["eventType"] == "FAIL" and event["job"]["name"] == "nightly_precompute.verify"
    ]
    assertions = failed["inputs"][0]["inputFacets"]["dataQualityAssertions"]["assertions"]
    (rule,) = [assertion for assertion in assertions if assertion["assertion"] == "coverage_of_live"]
    assert not rule["success"] and rule["expected"] == "0.8" and float(rule["actual"]) < 0.8
    message = failed["run"]["facets"]["errorMessage"]["message"]
    assert "coverage_of_live" in message and rule["actual"] in message and "0.8" in message

    # when: the receiver accepts connections and never answers
    write_interactions(nights.folder / "interactions.csv", seed=7)
    with silent() as receiver_of_none:
        states, silent_s = nights.run(http(receiver_of_none.url), "2026-01-31T00:00:00Z")
    assert set(states.values()) == {"success"}
    print(f"{seconds:.1f} s with a receiver, {silent_s:.1f} s with one that never answers")
