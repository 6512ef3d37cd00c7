"""The GPU bench: says that there is nothing to measure, and measures what it is told to."""

import json
import os
import subprocess
import sys

import pytest


def bench(device):
    environment = {**os.environ, "LARDER_DEVICE": device}
    environment.pop("LARDER_BENCH_DATA", None)
    command = [sys.executable, "-m", "tests.bench.gpu", "--quick", "--json"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_without_a_device_it_says_so_and_gives_no_ratio():
    found = bench("off")

    assert found["figures"]["device"] == "none: nothing is measured"
    assert found["ratios"] == {}


@pytest.mark.slow
def test_it_runs_to_its_end_on_torchs_processor_device():
    pytest.importorskip("torch", reason="make torch-env")

    found = bench("cpu")

    assert found["figures"]["million_recall"] == found["figures"]["skewed_recall"] == 1.0
    assert {"gpu.million_vs_matrix_product", "gpu.skewed_vs_matmul_topk"} <= set(found["rows"])
