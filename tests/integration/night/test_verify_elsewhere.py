"""Verifying on a host that built nothing, and against a live generation of which this host has no file."""

import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from cache.errors import Refused
from cache.l2.sync_clients import connect
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.builds.reports import VERIFY_REPORT
from precompute.releases.replication import run_ids
from precompute.steps import verify
from tests.integration.corpus import build
from tests.integration.nights import DATA_UNTIL, NEXT, prepare, publish_night


def test_another_host_compares_with_the_live_generation_from_the_store(tmp_path: Path, redis_url: str) -> None:
    config = prepare(tmp_path, redis_url, users=150, items=60)
    config = replace(config, artifacts=f"memory://verify-{uuid.uuid4().hex}")
    live = publish_night(config, DATA_UNTIL)
    generation = build(config, NEXT)
    shutil.rmtree(tmp_path / "state")

    elsewhere = replace(config, state="another-host")
    verify.run(elsewhere, {"generation": generation})

    with connect(config.redis_url, 5.0) as client:
        current_run_ids = run_ids(client)
    report = Build(elsewhere, elsewhere.store(), generation).read_report(VERIFY_REPORT)
    assert report is not None and report["run_ids"] == current_run_ids and current_run_ids["primary"]
    verdicts = read_manifest(config.store(), generation).gates
    compared = {gate["rule"] for gate in verdicts if gate.get("baseline") == live}
    assert {"list_jaccard", "score_psi", "coverage_of_live", "stale_lists"} <= compared
    assert all(gate["passed"] for gate in verdicts)


def test_a_live_generation_whose_files_are_gone_is_missed_by_the_gates_that_need_them(
    tmp_path: Path, redis_url: str
) -> None:
    config = prepare(tmp_path, redis_url, users=150, items=60)
    live = publish_night(config, DATA_UNTIL)
    generation = build(config, NEXT)
    (config.store().local(f"generations/{live}") / "items/ids.bin").unlink()

    with pytest.raises(Refused, match="list_jaccard"):
        verify.run(config, {"generation": generation})
