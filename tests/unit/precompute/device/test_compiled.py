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

    completed_process = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=600
    )

    kernel_reports = [json.loads(line) for line in completed_process.stdout.splitlines()]
    assert [kernel_report["name"] for kernel_report in kernel_reports] == ["above"] * 4 + ["keep"] + ["exact"] * 2 + [
        "leading"
    ]
    for kernel_report in kernel_reports:
        assert kernel_report["shared_bytes"] <= SHARED_BYTES
        assert (kernel_report["warpgroup_products"] > 0) == (kernel_report["name"] == "above")
        assert kernel_report["approximate_divisions"] == 0
        assert kernel_report["spilled_bytes"] <= SPILLED_BYTES
        if kernel_report["name"] == "exact":
            assert kernel_report["fused_multiply_adds"] == 0
