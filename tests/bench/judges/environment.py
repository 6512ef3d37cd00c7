"""The environment of libCacheSim and LoadGen: found, asked for a version, and running a module of this folder."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.tools.place import cores_at_start

PYTHON = Path(".venv-judges/bin/python")
ABSENT = "skipped: there is no LoadGen and no libCacheSim here; `make judges-env` installs them in .venv-judges"


def is_there() -> bool:
    """Return whether the environment exists."""
    return PYTHON.exists()


def run_program(program: str, job: Mapping[str, Any], timeout_s: float, *, last_core: bool = False) -> Any:
    """Run a program of theirs on a job, and read the JSON on the last line that it says.

    Raises RuntimeError with its last words where it fails, TimeoutExpired where it takes too long.
    """
    command: list[str] = [str(PYTHON), program]
    if last_core and len(cores_at_start) >= 2:
        command = ["taskset", "-c", str(cores_at_start[-1]), *command]
    completed_process = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, timeout=timeout_s
    )
    if completed_process.returncode != 0:
        problem_message = f"{Path(program).name} failed with {completed_process.returncode}"
        raise RuntimeError(f"{problem_message}:\n{completed_process.stdout[-500:]}{completed_process.stderr[-2000:]}")
    return json.loads(completed_process.stdout.splitlines()[-1])
