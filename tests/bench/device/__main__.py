"""A session on a GPU, under eight minutes: the tests of scoring on devices, then the benches, whose results are kept.

What each bench printed is written into the folder of results, under the GPU's name. Exit code: 0 all is well, 1 a test
or a bench failed, 3 there is no GPU here (or no torch that sees it), and nothing was run.
"""

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from cache.process.command_line import FOUND_PROBLEM_EXIT_CODE
from precompute.config.devices import devices

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tests/bench/results"
TESTS = (
    "tests/unit/precompute/device", "tests/unit/precompute/bundles/test_program.py",
    "tests/unit/precompute/config/test_devices.py", "tests/integration/night/test_device_night.py",
    "tests/integration/http/test_live_provider.py",
)  # fmt: skip
TESTS_S = 100.0
BENCHES = {
    "gpu": ("tests.bench.gpu", 150.0),
    "equal": ("tests.bench.device.equal", 40.0),
    "shard": ("tests.bench.device.shard", 150.0),
    "profile": ("tests.bench.device.profile", 40.0),
}
"""Benches by the name of their results, and the seconds that each may take."""


def name_of(device: str) -> str:
    """Return a GPU's name as part of a file name: `NVIDIA H200` becomes `h200`."""
    import torch

    name = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def ran(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Run a command and show its output; return (exit code, output), with code 124 after the time limit."""
    command_line = " ".join(command)
    print(f"== {command_line} (at most {seconds:.0f} s)", flush=True)
    try:
        completed_process = subprocess.run(
            [sys.executable, "-m", *command], env={**os.environ, **environment}, cwd=ROOT, timeout=seconds,
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode()
        print(printed, f"{command_line} took longer than {seconds:.0f} s", sep="\n", flush=True)
        return 124, printed
    print(completed_process.stdout, flush=True)
    return completed_process.returncode, completed_process.stdout


def keep(bench: str, gpu: str, printed: str) -> Path | None:
    """Write the last JSON line of a bench among the results, with the day; None if it printed none."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        return None
    bench_result = json.loads(lines[-1])
    path = RESULTS / f"{bench}-{gpu}.json"
    bench_result["date"] = datetime.now(UTC).date().isoformat()
    path.write_text(json.dumps(bench_result, indent=1) + "\n")
    return path


def main() -> int:
    """Run the session; the exit code."""
    gpu_devices = [device_name for device_name in devices("auto") if device_name.startswith("cuda")]
    if not gpu_devices:
        print("no GPU here, or no torch that sees it (`make torch-env`): nothing was run")
        return FOUND_PROBLEM_EXIT_CODE
    gpu, started, failed = name_of(gpu_devices[0]), time.perf_counter(), []
    test_command = [
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not storm",
        "-n",
        "8",
        "--dist",
        "loadfile",
        *TESTS,
    ]
    if ran(test_command, TESTS_S, LARDER_TEST_DEVICE="cuda")[0]:
        failed.append("tests")
    for bench, (module, seconds) in BENCHES.items():
        code, printed = ran([module, "--json"], seconds)
        if code:
            failed.append(bench)
        if path := keep(bench, gpu, printed):
            print(f"kept in {path.relative_to(ROOT)}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s; failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
