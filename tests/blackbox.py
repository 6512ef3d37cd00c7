"""Larder from outside, without an import of it: a small shop's clicks, the command `larder`, a service on a port."""

import contextlib
import csv
import os
import random
import socket
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

LARDER = Path(sys.executable).with_name("larder")
USERS = [letter + digit for letter in string.ascii_letters for digit in string.digits]
"""Ids of the shop's users: two characters each, so that bodies which name one are equally long."""
ITEMS = 300
_SETTINGS = """
shards = 2

[sources]
interactions = ["clicks.csv"]
timestamp_column = ""
weight_column = ""

[reference]
dims = 16
choose = false
"""
_ANNOUNCED = "Larder serves on "
_START_S = 60.0


class StartFailed(AssertionError):
    """A service ended before it announced its URL; the message is its log."""


@dataclass(frozen=True)
class Shop:
    """A folder with clicks and settings, and the environment of commands that run in it."""

    folder: Path
    environ: dict[str, str]

    def run(self, *arguments: str, timeout_s: float = 240.0, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run `larder` with these words and environment variables (in capitals); return how it ended."""
        return subprocess.run(
            [LARDER, *arguments], cwd=self.folder, env=self.environ | more,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def must_run(self, *arguments: str) -> str:
        """Run `larder` with these words and return its output; raise unless it ends with 0."""
        completed_process = self.run(*arguments)
        assert completed_process.returncode == 0, (
            f"larder {' '.join(arguments)}: {completed_process.stdout}{completed_process.stderr}"
        )
        return completed_process.stdout


@dataclass(frozen=True)
class RunningService:
    """A running service: its process id, and where it listens."""

    pid: int
    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return f"http://{self.host}:{self.port}"

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def clean_environ() -> dict[str, str]:
    """Return the environment without any setting of Larder, with long deadlines, since tests share few cores."""
    # Let commands write and import compiled bytecode: compiling takes half of a command's time.
    left_out = ("REDIS_URL", "PYTHONDONTWRITEBYTECODE")
    names = [name for name in os.environ if not name.startswith("LARDER_") and name not in left_out]
    return {name: os.environ[name] for name in names} | {
        "OMP_NUM_THREADS": "1",
        "LARDER_DEADLINE_MS": "5000",
        "LARDER_L2_DEADLINE_MS": "1000",
        "LARDER_QUEUE_INTERVAL_MS": "60000",
        "LARDER_POLL_S": "0.2",
    }


def open_shop(folder: Path, redis_url: str, *, seed: int = 0) -> Shop:
    """Write clicks and settings, train a bundle and publish one night, through the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    with (folder / "clicks.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item"])
        for user in USERS:
            taste = rng.randrange(10)
            for _ in range(30):
                is_typical = rng.random() < 0.8
                item = 30 * taste + rng.randrange(30) if is_typical else rng.randrange(ITEMS)
                rows.writerow([user, f"i{1000 + item}"])
    namespace = f"shop-{random.SystemRandom().randrange(1 << 32):08x}"
    environ = clean_environ() | {"REDIS_URL": redis_url, "LARDER_NAMESPACE": namespace}
    shop = Shop(folder, environ)
    (folder / "larder.toml").write_text(_SETTINGS)
    shop.must_run("train")
    shop.must_run("night")
    return shop


@contextlib.contextmanager
def started(shop: Shop, log: Path, **more: str) -> Iterator[RunningService]:
    """Serve the shop on a free port, with its errors in `log`."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [LARDER, "serve", "--port", "0"], cwd=shop.folder, env=shop.environ | more,
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    lines: Queue[str] = Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        line = ""
        while not line.startswith(_ANNOUNCED):
            line = lines.get(timeout=_START_S)
            if not line:
                raise StartFailed(f"the service ended at its start: {log.read_text()}")
        host, _, port = line.removeprefix(_ANNOUNCED).strip().rpartition("/")[2].rpartition(":")
        yield RunningService(process.pid, host, int(port))
    except Empty as error:
        raise AssertionError(f"nothing was announced: {log.read_text()}") from error
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if a connection to the port is taken."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def nginx(program: str, folder: Path, http_lines: str) -> Iterator[None]:
    """Run one nginx process with these lines in its `http` block until the block ends."""
    (folder / "nginx.conf").write_text(f"""
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  {http_lines}
}}""")
    process = subprocess.Popen(
        [program, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)
