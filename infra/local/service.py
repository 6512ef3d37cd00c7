"""The lookup service as a process of its own, gone when its `with` block ends."""

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cache.process.child_process import Guarded

ROOT = Path(__file__).parents[2]
START_S = 60.0
_ANNOUNCED = re.compile(r"^Larder serves on (https?://\S+)", re.MULTILINE)


class ServiceFailed(RuntimeError):
    """The service did not come up, or ended by itself; the message holds the log's end."""


class ServiceProcess:
    """`python -m serving` (or what stands in for it) on a free loopback port; `url` is set once it answers."""

    def __init__(
        self,
        log: Path,
        environment: Mapping[str, str],
        *,
        module: str = "serving",
    ) -> None:
        self.url = ""
        self.log = log
        self._environment = {**os.environ, **environment, "PYTHONPATH": _search_path()}
        self._module = module
        self._process: Guarded | None = None

    def __enter__(self) -> Self:
        self.log.unlink(missing_ok=True)
        command = [sys.executable, "-m", self._module, "--port", "0"]
        self._process = Guarded(command, log=self.log, env=self._environment, cwd=ROOT)
        try:
            self.url = self._announced()
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stop()

    def check(self) -> None:
        """Raises ServiceFailed when the process is no longer there."""
        if self._process is None or not self._process.running:
            tail = "" if self._process is None else self._process.tail()
            raise ServiceFailed(f"the service ended by itself\n{tail}")

    def _announced(self) -> str:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            self.check()
            if self.log.exists() and (
                found := _ANNOUNCED.search(self.log.read_text("utf-8", "replace"))
            ):
                return found[1]
            time.sleep(0.02)
        raise ServiceFailed(f"the service did not come up within {START_S:.0f} s")


def _search_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
