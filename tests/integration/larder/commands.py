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
NOTHING: Mapping[str, str] = {}


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Without any setting from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    for name in ("REDIS_URL", "AIRFLOW_HOME", "AIRFLOW__CORE__DAGS_FOLDER"):
        kept.pop(name, None)
    server = {"LARDER_REDIS_SERVER": str(redis_binary())}
    return {**kept, **server, "PYTHONPATH": str(ROOT), "LARDER_DEADLINE_MS": "5000", **more}


def larder(folder: Path, *words: str, code: int = 0, environ: Mapping[str, str] = NOTHING) -> str:
    """What a command prints; it ends with this code, and with no traceback."""
    found = subprocess.run(
        [sys.executable, "-m", "infra.cli", *words],
        cwd=folder, env=environment(environ), capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert found.returncode == code, (words, found.stdout, found.stderr)
    assert "Traceback" not in found.stderr
    return found.stdout + found.stderr


@contextlib.contextmanager
def running(
    folder: Path, *words: str, until: str, environ: Mapping[str, str] = NOTHING
) -> Iterator[str]:
    """A command that runs until Ctrl-C: the end of its first line that begins with `until`; it ends well."""
    log = folder / f"{words[0]}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.cli", *words],
            cwd=folder, env=environment(environ), stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        give_up = time.monotonic() + START_S
        while not (
            lines := [each for each in log.read_text().splitlines() if each.startswith(until)]
        ):
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield lines[0].removeprefix(until).strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(10)
