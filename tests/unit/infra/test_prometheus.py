"""The files that are shipped for Prometheus are such as it takes."""

import shutil
import subprocess
from pathlib import Path

import pytest

INFRA = Path(__file__).parents[3] / "infra"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH: apt-get install prometheus, or run .ci/run"
)


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    files = sorted((INFRA / "prometheus/rules").glob("*.yml"))
    for command in (
        ["check", "rules", "--lint=all", "--lint-fatal", *map(str, files)],
        ["check", "config", str(INFRA / "prometheus/prometheus.yml")],
    ):
        completed_process = subprocess.run(
            ["promtool", *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert completed_process.returncode == 0, completed_process.stdout + completed_process.stderr
