"""A child process that never outlives its parent, however the parent ends."""

import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

# The shell holds the reading end of a pipe whose only writing end is ours. The kernel closes it
# when we die, kill -9 included, and `read` returns. What is ended is the whole session, not only
# the group: Airflow puts each task into a group of its own. A handler, unlike an ignored signal,
# is not inherited, so only the shells survive the TERM that they send.
_GUARD = """
exec 3<&0 </dev/null
grace=$1; shift
"$@" 3<&- &
child=$!
(
  trap : TERM
  read -r _ <&3
  kill -TERM 0
  while [ "$grace" -gt 0 ] && kill -0 "$child" 2>/dev/null; do sleep 0.1; grace=$((grace - 1)); done
  kill -KILL "$child" 2>/dev/null
) &
trap : TERM
while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done

end() { [ "$1" = "$$" ] || kill -KILL "$1" 2>/dev/null; }
if [ -r /proc/self/stat ]; then
  for process in /proc/[0-9]*; do
    { read -r line <"$process/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    [ "$4" != "$$" ] || end "${process#/proc/}"
  done
else
  ps -Ao pid=,pgid= | while read -r id group; do [ "$group" != "$$" ] || end "$id"; done
fi
exit "$status"
"""

_started: "weakref.WeakSet[Guarded]" = weakref.WeakSet()


@cache
def _let_go_in_children() -> None:
    """Make forked children drop the pipes: one of them alive must not keep a dead parent's server."""

    def let_go() -> None:
        for process in list(_started):
            process.cut()

    os.register_at_fork(after_in_child=let_go)


class Guarded:
    """A command in a session of its own, ended with all of it when this process ends.

    Ctrl-C in the terminal does not reach it: whoever owns it says when it stops.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 10.0,
    ) -> None:
        """Start `command` with its output appended to `log`; TERM first, KILL after `grace_s`."""
        self.command = tuple(str(part) for part in command)
        self.log = log
        self._grace_s = grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        self._owner = os.getpid()
        _let_go_in_children()
        reading, self._pipe = os.pipe()
        _started.add(self)
        try:
            with log.open("ab") as output:
                self._guard = subprocess.Popen(
                    ["sh", "-c", _GUARD, "guard", str(int(grace_s * 10)), *self.command],
                    stdin=reading,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=None if env is None else dict(env),
                    cwd=cwd,
                    start_new_session=True,
                )
        except BaseException:
            self.cut()
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        """Process id of the guard, which is also the id of the command's group."""
        return self._guard.pid

    @property
    def running(self) -> bool:
        """True while the command runs."""
        return self._guard.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the command, None while it runs."""
        return self._guard.poll()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, for a message about why it ended."""
        with suppress(FileNotFoundError):
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        return ""

    def cut(self) -> None:
        """Close our end of the pipe; the guard then ends its session by itself."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def stop(self) -> None:
        """End the command and its whole session, and wait for it; only where it was started."""
        self.cut()
        if os.getpid() != self._owner:
            return
        try:
            self._guard.wait(timeout=self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
