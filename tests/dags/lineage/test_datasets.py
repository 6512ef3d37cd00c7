"""What the extractor makes of a night's tasks: names, rows, verdicts of gates, and nothing of other DAGs."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cache.errors import Refused
from cache.process.redis_server import RedisServer
from infra.local.airflow import ROOT, local_airflow_settings
from precompute.config.settings import NightConfig, night_config
from precompute.reference.train import train_reference
from precompute.steps.night import Night, run_night
from tests.dags.lineage.receiver import silent
from tests.dags.lineage.schemas import NOT_NAMED, SPEC, complaints
from tests.dags.place import CONFIG, ITEMS, USERS, write_interactions
from tests.opened import open_generation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openlineage") is None, reason="the extra `lineage` is not installed"
)

Events = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[NightConfig]:
    """A published night, in a database of its own."""
    folder, url = tmp_path_factory.mktemp("lineage"), redis_server.url.removesuffix("0") + "7"
    write_interactions(folder / "interactions.csv", seed=7)
    (folder / "larder.toml").write_text(CONFIG)
    config = night_config(str(folder / "larder.toml"), {"REDIS_URL": url})
    train_reference(config)
    run_night(Night(config, "first", "2026-01-29T00:00:00Z"))
    yield config
    with redis.Redis.from_url(url) as client:
        client.flushdb()


Run = Callable[..., str]


@pytest.fixture
def ran(night: NightConfig, tmp_path: Path) -> Run:
    """Return a function that runs a module of this folder on a generation and returns its output."""

    def run(module: str, generation: str, **more: str) -> str:
        build = {"generation": generation, "url": "", "shards": [0, 1, 2]}
        environ = {
            **os.environ, **local_airflow_settings(tmp_path, "http://127.0.0.1:1", 1),
            "LARDER_CONFIG": str(night.path("larder.toml")), "REDIS_URL": str(night.redis_url),
            "AIRFLOW__OPENLINEAGE__EXTRACTORS": "infra.lineage.extractor.NightExtractor", **more,
        }  # fmt: skip
        completed_process = subprocess.run(
            [sys.executable, "-m", f"tests.dags.lineage.{module}", json.dumps(build)],
            env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert completed_process.returncode == 0, completed_process.stderr[-2000:]
        return completed_process.stdout

    return run


@pytest.fixture
def extracted(ran: Run) -> Callable[[str], Events]:
    """Events of the tasks of a generation, by task; `other` is that of another DAG's task."""

    def extract(generation: str) -> Events:
        lines = ran("extracted", generation).splitlines()
        events = [json.loads(line) for line in lines if line.startswith('{"')]
        *night_events, other_event = events
        return {**{event["job"]["name"]: event for event in night_events}, "other": other_event}

    return extract


def by_name(datasets: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {dataset["name"].rpartition("/")[2]: dataset for dataset in datasets}


def are_of_the_stream(night: NightConfig, run_event: dict[str, Any]) -> bool:
    """Whether three events came from their stream in Redis into the files of the store, up to one position."""
    (stream,), (files,) = run_event["inputs"], run_event["outputs"]
    assert stream["name"] == f"7/{night.keyspace().events}"
    assert (files["namespace"], files["name"]) == ("file", str(night.store().local("events")))
    counts = (
        stream["inputFacets"]["inputStatistics"]["rowCount"],
        files["outputFacets"]["outputStatistics"]["rowCount"],
    )
    versions = {dataset["facets"]["version"]["datasetVersion"] for dataset in (stream, files)}
    return counts == (3, 3) and versions == {"1769731200000-0"}


def test_every_task_reports_what_it_read_and_wrote_and_how_much(
    night: NightConfig, extracted: Callable[[str], Events]
) -> None:
    generation = night.store().names("generations")[0]
    manifest, _ = open_generation(night.store(), generation)

    events = extracted(generation)

    # For a task of another DAG, it reports what the provider reports for an operator without an extractor.
    other_event = events.pop("other")
    assert (
        other_event["inputs"] == other_event["outputs"] == []
        and "unknownSourceAttribute" in other_event["run"]["facets"]
    )
    datasets = [dataset for event in events.values() for dataset in (*event["inputs"], *event["outputs"])]
    assert {generation not in dataset["name"] for dataset in datasets} == {True}
    sources, begin_outputs = by_name(events["begin"]["inputs"]), by_name(events["begin"]["outputs"])
    clicks = sources["interactions.csv"]
    assert (clicks["namespace"], clicks["name"]) == ("file", str(night.path("interactions.csv")))
    rows = len(night.path("interactions.csv").read_text().splitlines()) - 1
    assert clicks["inputFacets"]["inputStatistics"]["rowCount"] == rows
    assert begin_outputs["partition"]["outputFacets"]["outputStatistics"]["rowCount"] == USERS
    shard = by_name(events["score_shard"]["outputs"])["user_topk"]
    assert shard["outputFacets"]["outputStatistics"]["rowCount"] == manifest.tables["user_topk"].parts[1].count
    assert shard["facets"]["version"]["datasetVersion"] == generation
    (symlink,) = shard["facets"]["symlinks"]["identifiers"]
    assert Path(symlink["name"]).is_dir() and generation in symlink["name"]
    pages = {dataset["name"]: dataset for dataset in events["load"]["outputs"]}
    page = pages["7/larder:1:default:g:user_topk"]
    assert page["namespace"].startswith("redis://127.0.0.1:")
    assert page["outputFacets"]["outputStatistics"]["rowCount"] == USERS
    vectors = by_name(events["build_index"]["inputs"])["vectors.f32"]
    assert vectors["inputFacets"]["inputStatistics"]["rowCount"] == ITEMS
    assert are_of_the_stream(night, events.pop("take_events"))
    # What one task writes the next one reads under the same name, from begin to the pointer.
    written = {(dataset["namespace"], dataset["name"]) for event in events.values() for dataset in event["outputs"]}
    read = {(dataset["namespace"], dataset["name"]) for event in events.values() for dataset in event["inputs"]}
    internal_reads = {dataset_id for dataset_id in read if "/generations" in dataset_id[1] or dataset_id[0] != "file"}
    assert internal_reads <= written
    gates = events["verify"]["inputs"][0]["inputFacets"]["dataQualityAssertions"]["assertions"]
    assert len(gates) == len(manifest.gates) and all(gate["success"] for gate in gates)
    assert events["retire"]["inputs"] == events["retire"]["outputs"] == []


def test_a_refused_gate_names_its_rule_its_value_and_its_threshold(
    night: NightConfig, ran: Run, tmp_path: Path
) -> None:
    write_interactions(night.path("interactions.csv"), seed=7, users=USERS // 2)
    with pytest.raises(Refused) as refused:
        run_night(Night(night, "second", "2026-01-30T00:00:00Z"))
    generation = next(
        generation_id for generation_id in night.store().names("generations") if generation_id > "20260130"
    )

    # A receiver that never answers is called once, and the other receiver still gets the event.
    file = tmp_path / "events.jsonl"
    with silent() as receiver:
        transports = {
            "a": {"type": "http", "url": receiver.url, "timeout": 1, "retry": {"total": 0}},
            "b": {"type": "file", "log_file_path": str(file), "append": True},
        }
        transport = {"type": "composite", "transports": transports}
        ran("refused", generation, AIRFLOW__OPENLINEAGE__TRANSPORT=json.dumps(transport))
        assert receiver.connections() == 1
    (event,) = map(json.loads, file.read_text().splitlines())

    assert (event["eventType"], event["job"]["name"]) == ("FAIL", "nightly_precompute.verify")
    assert "coverage_of_live" in event["run"]["facets"]["errorMessage"]["message"]
    gates = event["inputs"][0]["inputFacets"]["dataQualityAssertions"]["assertions"]
    failed = {assertion["assertion"]: assertion for assertion in gates if not assertion["success"]}
    failed_assertion = failed["coverage_of_live"]
    assert (failed_assertion["expected"], failed_assertion["severity"]) == ("0.8", "error")
    assert float(failed_assertion["actual"]) < 0.8 and failed_assertion["actual"] in str(refused.value)


@pytest.mark.skipif(not SPEC, reason=NOT_NAMED)
def test_events_are_as_the_specification_has_them(night: NightConfig, extracted: Callable[[str], Events]) -> None:
    events = extracted(night.store().names("generations")[0])

    assert [complaint for event in events.values() for complaint in complaints(event)] == []
    del events["begin"]["job"]["name"]
    assert complaints(events["begin"]) != []
