"""HTTP load from wrk, and programs under it: a Python client would measure itself."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.bench.tools.place import cores_at_start, pin

BUSY = 0.95
"""Share of its core that a server must have used for its rate to be a limit of the server."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server under load."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Processor time so far, all threads that are there; in nanoseconds where the kernel keeps them, else ticks."""
        try:
            tasks = [stat_file.read_text() for stat_file in Path(f"/proc/{self.pid}/task").glob("*/schedstat")]
        except OSError:  # a thread that ended just now
            tasks = []
        if tasks:
            return sum(int(schedstat.split()[0]) for schedstat in tasks) / 1e9
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """One run of wrk."""

    requests_per_s: float
    p99_ms: float
    busy: float


@contextmanager
def program(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Start a server on one core; it says its URL on a line of its output."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,
        )
    try:
        yield Program(_url(process, log), process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):  # workers too, where it has some
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _url(process: "subprocess.Popen[bytes]", log: Path, timeout_s: float = 60.0) -> str:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up and process.poll() is None:
        if url_match := re.search(r"^\S.* (?:on|at:) (http://\S+)(?: \(\d+\))?$", log.read_text(), re.MULTILINE):
            return url_match[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")


def wrk(target: Program, script: Path, *, connections: int, duration_s: int) -> Load:
    """Load one server with keep-alive connections; the script chooses the paths."""
    if shutil.which("wrk") is None:
        raise RuntimeError("wrk is not installed")
    command: list[str] = ["wrk", "-t1", f"-c{connections}", f"-d{duration_s}s", "--latency"]
    if len(cores_at_start) >= 2:
        command = ["taskset", "-c", str(cores_at_start[-1]), *command]
    started_at, cpu_s_before = time.monotonic(), target.cpu_s()
    wrk_output = subprocess.run(
        [*command, "-s", str(script), target.url], capture_output=True, text=True, check=True
    ).stdout
    busy = (target.cpu_s() - cpu_s_before) / (time.monotonic() - started_at)
    if "Non-2xx" in wrk_output or "Socket errors" in wrk_output:
        raise RuntimeError(f"not every request was answered:\n{wrk_output}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", wrk_output)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", wrk_output)
    if rate is None or p99 is None:
        raise RuntimeError(f"wrk said something unexpected:\n{wrk_output}")
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}[p99[2]]
    return Load(float(rate[1]), float(p99[1]) * scale, busy)


def paths_script(path: Path, paths: Sequence[str]) -> Path:
    """A wrk script that asks for the paths in turn, so that client and server do the same work for each program."""
    request_lines = ",\n".join(f'  wrk.format("GET", "{request_path}")' for request_path in paths)
    path.write_text(
        f"local requests\nlocal at = 0\nfunction init()\n  requests = {{\n{request_lines}\n  }}\nend\n"
        "function request()\n  at = at % #requests + 1\n  return requests[at]\nend\n"
    )
    return path


def pin_programs(*programs: Program, core: int = 0) -> str:
    """Pin servers with all their threads, once they have started them."""
    return {pin(server_program.pid, core) for server_program in programs}.pop()
