"""The kernels compile for GPUs that this machine does not have, into what was meant."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")
pytest.importorskip("triton", reason="the kernels are Triton's: make torch-env")

SHARED_BYTES = 227 << 10
"""A program of compute capability 9.0 may have so much."""
SPILLED_BYTES = 32
"""More than that a thread would fetch again and again from memory."""


@pytest.mark.slow
def test_kernels_compile_into_products_of_warpgroups_and_sums_that_are_rounded_twice(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.precompute.device.compiled"]

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=600
    )

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in found] == ["above"] * 4 + ["keep"] + ["exact"] * 2 + [
        "leading"
    ]
    for each in found:
        assert each["shared_bytes"] <= SHARED_BYTES
        assert (each["warpgroup_products"] > 0) == (each["name"] == "above")
        assert each["approximate_divisions"] == 0
        assert each["spilled_bytes"] <= SPILLED_BYTES
        if each["name"] == "exact":
            assert each["fused_multiply_adds"] == 0
