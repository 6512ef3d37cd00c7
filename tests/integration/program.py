"""`python -m serving` as a program of its own."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

from precompute.config.settings import NightConfig

ROOT = Path(__file__).parents[2]
ANNOUNCED = "Larder serves on "


def environment(night: NightConfig, state: Path, **more: str) -> dict[str, str]:
    """Return an environment without a Redis unless `more` names one, with long deadlines."""
    base_environ = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    base_environ.pop("REDIS_URL", None)
    return base_environ | {
        "LARDER_ARTIFACTS": str(night.path(night.artifacts)),
        "LARDER_NAMESPACE": night.namespace,
        "LARDER_STATE": str(state),
        "LARDER_DEADLINE_MS": "5000",
        "LARDER_L2_DEADLINE_MS": "1000",
        "LARDER_QUEUE_INTERVAL_MS": "60000",
        "PYTHONPATH": str(ROOT),
    } | more  # fmt: skip


@contextlib.contextmanager
def started(
    environ: dict[str, str], log: Path | None = None, *, python: Path = Path(sys.executable), cwd: Path = ROOT
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run the program; yield it and the URL that it announced; `log` takes its errors."""
    errors = subprocess.DEVNULL if log is None else log.open("wb")
    process = subprocess.Popen(
        [python, "-m", "serving", "--port", "0"],
        env=environ, cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True,
    )  # fmt: skip
    lines: Queue[str] = Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        line = lines.get(timeout=60)
        assert line.startswith(ANNOUNCED), line
        yield process, line.removeprefix(ANNOUNCED).strip()
    except Empty as error:
        raise AssertionError("nothing was announced") from error
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())
