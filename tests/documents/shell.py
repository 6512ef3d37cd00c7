"""A shell that runs the commands in the documents, one page after another."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.program import ANNOUNCED

ADDRESS = "http://127.0.0.1:8000"
PRELUDE = f"""
set -euo pipefail
curl() {{ command curl -sS --fail-with-body "$@"; echo; }}
in_another_terminal() {{  # until the page is done
  command "$@" > served.log 2>&1 &
  echo $! >> served.pids
  for _ in $(seq 900); do ! grep -q '^{ANNOUNCED}' served.log || return 0; kill -0 $! || break; sleep 0.2; done
  cat served.log; return 1
}}
larder() {{
  case "$1" in
    serve) in_another_terminal larder "$@" --port 0 ;;
    lookup|explain) command larder "$@" --url {ADDRESS} ;;
    check|status) command larder "$@" || [ $? = 3 ] ;;  # 3: not all is well, which it says
    *) command larder "$@" ;;
  esac
}}
python() {{
  case " $* " in
    *" -m serving --port 8000 "*) in_another_terminal python "${{@/8000/0}}" ;;
    *" status "*) command python "$@" || [ $? = 3 ] ;;  # 3: not all is well, which it says
    *) command python "$@" ;;
  esac
}}
"""
ADDRESSES = (ADDRESS, "http://localhost:8000")
TIMEOUT_S = 500


@dataclass
class Shell:
    """A folder, its environment, the address of its service, and replacements for the placeholders in texts."""

    folder: Path
    environ: dict[str, str]
    url: str = ""
    names: dict[str, str] = field(default_factory=dict)

    def sh(self, text: str) -> "subprocess.CompletedProcess[str]":
        """Run a block of commands and return the output; the first failing command ends it."""
        return self._run(["bash", "-c", self._fill_placeholders(PRELUDE + text)])

    def python(self, text: str) -> "subprocess.CompletedProcess[str]":
        """Run a program and return its output."""
        return self._run(["python", "-c", self._fill_placeholders(text)])

    def close(self) -> None:
        """End the services that were started."""
        pids = self.folder / "served.pids"
        for pid in pids.read_text().split() if pids.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGINT)

    def _fill_placeholders(self, text: str) -> str:
        log = self.folder / "served.log"
        served = log.read_text().partition(ANNOUNCED)[2] if log.exists() else ""
        url = served.split()[0] if served else self.url
        for placeholder, replacement in [*((address, url) for address in ADDRESSES), *self.names.items()]:
            text = text.replace(placeholder, replacement)
        return text

    def _run(self, argv: list[str]) -> "subprocess.CompletedProcess[str]":
        # Write to a file, not to pipes, which a service that stays in the background would hold open. `timeout` ends
        # what a shell started.
        output_path = self.folder / "said.txt"
        with output_path.open("w") as output_file:
            completed = subprocess.run(
                ["timeout", str(TIMEOUT_S), *argv], cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL,
                stdout=output_file, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        return subprocess.CompletedProcess(argv, completed.returncode, output_path.read_text())
