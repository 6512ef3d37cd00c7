"""Lookup service as a child process that ends with its `with` block."""

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cache.process.child_process import GuardedCommand

ROOT = Path(__file__).parents[2]
START_S_MAX = 60.0
_ANNOUNCEMENT_PATTERN = re.compile(r"^Larder serves on (https?://\S+)", re.MULTILINE)


class ServiceFailed(RuntimeError):
    """The service did not start, or ended unexpectedly; the message has the end of its log."""


class ServiceProcess:
    """Process of `python -m serving` (or another module) on a free loopback port; `url` is set once it listens.

    `working_folder` is the checkout from which it runs, `python_path` the interpreter.
    """

    def __init__(
        self,
        log_path: Path,
        environment: Mapping[str, str],
        *,
        module_name: str = "serving",
        working_folder: Path = ROOT,
        python_path: Path = Path(sys.executable),
    ) -> None:
        self.url = ""
        self.log = log_path
        self._environment = {**os.environ, **environment, "PYTHONPATH": _python_path(working_folder)}
        self._command: list[str | Path] = [python_path, "-m", module_name, "--port", "0"]
        self._root = working_folder
        self._process: GuardedCommand | None = None

    def __enter__(self) -> Self:
        self.log.unlink(missing_ok=True)
        self._process = GuardedCommand(self._command, log_path=self.log, env=self._environment, cwd=self._root)
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stop()

    def check(self) -> None:
        """Raise ServiceFailed if the process has ended."""
        if self._process is None or not self._process.is_running:
            tail = "" if self._process is None else self._process.log_tail()
            raise ServiceFailed(f"the service ended unexpectedly\n{tail}")

    def _wait_for_url(self) -> str:
        give_up_at = time.monotonic() + START_S_MAX
        while time.monotonic() < give_up_at:
            self.check()
            if self.log.exists() and (
                announcement := _ANNOUNCEMENT_PATTERN.search(self.log.read_text("utf-8", "replace"))
            ):
                return announcement[1]
            time.sleep(0.02)
        raise ServiceFailed(f"the service did not start within {START_S_MAX:.0f} s")


def _python_path(root: Path) -> str:
    return os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
