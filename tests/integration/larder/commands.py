"""`larder` as a program of its own, without any setting from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import redis_binary

ROOT = Path(__file__).parents[3]
START_S = 60.0
NO_SETTINGS: Mapping[str, str] = {}


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without any setting from outside."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    for name in ("REDIS_URL", "AIRFLOW_HOME", "AIRFLOW__CORE__DAGS_FOLDER"):
        environ.pop(name, None)
    server = {"LARDER_REDIS_SERVER": str(redis_binary())}
    return {**environ, **server, "PYTHONPATH": str(ROOT), "LARDER_DEADLINE_MS": "5000", **more}


def larder(folder: Path, *arguments: str, code: int = 0, environ: Mapping[str, str] = NO_SETTINGS) -> str:
    """Run a command and return its output; it must end with this code and without a traceback."""
    completed_process = subprocess.run(
        [sys.executable, "-m", "infra.cli", *arguments],
        cwd=folder, env=environment(environ), capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert completed_process.returncode == code, (arguments, completed_process.stdout, completed_process.stderr)
    assert "Traceback" not in completed_process.stderr
    return completed_process.stdout + completed_process.stderr


@contextlib.contextmanager
def running(folder: Path, *arguments: str, line_prefix: str, environ: Mapping[str, str] = NO_SETTINGS) -> Iterator[str]:
    """Run a command until Ctrl-C; yield the rest of its first line that begins with `line_prefix`."""
    log = folder / f"{arguments[0]}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.cli", *arguments],
            cwd=folder, env=environment(environ), stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        give_up = time.monotonic() + START_S
        while not (lines := [line for line in log.read_text().splitlines() if line.startswith(line_prefix)]):
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield lines[0].removeprefix(line_prefix).strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(10)
