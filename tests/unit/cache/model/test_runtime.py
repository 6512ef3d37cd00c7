"""ONNX Runtime reports to nobody from any process of ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT_PROGRAM = """
import os, sys
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print("telemetry off:", os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Look())
import {module}
"""
ROOT = Path(__file__).parents[4]
USERS = sorted(
    str(file.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for package in ("cache", "precompute", "serving", "dags", "infra")
    for file in (ROOT / package).rglob("*.py")
    if re.search(r"^\s*(import|from) onnxruntime", file.read_text(), re.MULTILINE)
)


def test_only_what_must_imports_it_itself() -> None:
    assert USERS == ["cache.model.runtime", "precompute.bundles.quantize"]


@pytest.mark.parametrize("module", USERS)
@pytest.mark.parametrize("telemetry_setting", [None, "0"])
def test_telemetry_is_off_before_the_first_import_unless_it_is_wanted(
    module: str, telemetry_setting: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | (
        {} if telemetry_setting is None else {"ORT_DISABLE_TELEMETRY": telemetry_setting}
    )

    completed_process = subprocess.run(
        [sys.executable, "-c", IMPORT_PROGRAM.format(module=module)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    assert completed_process.stdout.splitlines()[0] == f"telemetry off: {telemetry_setting or 1}"
