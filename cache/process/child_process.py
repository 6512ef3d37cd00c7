"""Child process that never outlives its parent, however the parent ends."""

import fcntl
import os
import signal
import subprocess
import termios
import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

# The shell holds the reading end of a pipe. The kernel closes a writing end when its process dies,
# kill -9 included, and `read` fails once the last one is closed; a line that somebody writes only
# shows that the shell still reads. What is ended is the whole session, not only the group: Airflow
# puts each task into a group of its own. A handler, unlike an ignored signal, is not inherited, so
# only the shells survive the TERM that they send.
_GUARD = """
exec 3<&0 </dev/null
grace=$1; shift
"$@" 3<&- &
child=$!
(
  trap : TERM
  while read -r _ <&3; do :; done
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

_open_ends: "weakref.WeakSet[WritingEnd]" = weakref.WeakSet()


@cache
def _close_ends_in_children() -> None:
    """Make forked children close the pipes: a living child must not keep a dead parent's server."""

    def close_all() -> None:
        for end in list(_open_ends):
            end.close()

    os.register_at_fork(after_in_child=close_all)


class WritingEnd:
    """Writing end of a guard's pipe: the command runs for as long as one is open."""

    def __init__(self, descriptor: int) -> None:
        """Take ownership of `descriptor`."""
        self._descriptor = descriptor
        _close_ends_in_children()
        _open_ends.add(self)

    def close(self) -> None:
        """Close the end; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class NamedPipe:
    """Named pipe by which other processes keep a guarded command alive.

    Callers of `ends` or `join` and of `is_held` must exclude one another by a lock of their own.
    """

    def __init__(self, path: Path) -> None:
        """Set the name; the pipe is not made yet."""
        self.path = path

    def create(self) -> bool:
        """Make a new pipe under this name; False if the file system does not support pipes."""
        self.path.unlink(missing_ok=True)
        try:
            os.mkfifo(self.path, 0o600)
        except OSError:
            return False
        return True

    def ends(self) -> tuple[int, int]:
        """Open a reading and a writing end."""
        # Opened the plain way, each end would wait for the other one.
        reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            writing = os.open(self.path, os.O_WRONLY)
        except BaseException:
            os.close(reading)
            raise
        os.set_blocking(reading, True)
        return reading, writing

    def join(self, is_running: Callable[[], bool], *, limit_s: float) -> WritingEnd | None:
        """Open one more writing end; None if the guard has seen the last one closed, or is gone.

        A guard that has seen that ends the command, however many ends are opened then. So a line is written, and only
        a guard that still waits for the end reads it.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None
        end = WritingEnd(descriptor)
        give_up = time.monotonic() + limit_s
        try:
            os.write(descriptor, b"\n")
            while _unread_bytes(descriptor) and is_running() and time.monotonic() < give_up:
                time.sleep(0.005)
            if not _unread_bytes(descriptor):
                return end
        except BrokenPipeError:
            pass
        except BaseException:
            end.close()
            raise
        end.close()
        return None

    def is_held(self) -> bool:
        """True if any process has a writing end open."""
        try:
            reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return os.read(reading, 1) != b""
        except BlockingIOError:
            return True
        finally:
            os.close(reading)


def _unread_bytes(descriptor: int) -> int:
    unread = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, unread)
    return unread[0]


class GuardedCommand:
    """Command in a session of its own, which ends with all its processes when this process ends.

    Ctrl-C in the terminal does not reach it: its owner calls `stop`. With a named pipe it goes on until
    the last process that has joined the pipe ends.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 10.0,
        pipe: NamedPipe | None = None,
    ) -> None:
        """Start `command` with its output appended to `log`; a stop sends TERM first, KILL after `grace_s`."""
        self.command = tuple(str(part) for part in command)
        self.log = log
        self._grace_s = grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        self._owner = os.getpid()
        reading, writing = os.pipe() if pipe is None else pipe.ends()
        self._end = WritingEnd(writing)
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
        """Return the last lines of the log, for an error message."""
        with suppress(FileNotFoundError):
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        return ""

    def cut(self) -> None:
        """Close this process's end of the pipe; once no other process holds one, the guard ends its session."""
        self._end.close()

    def stop(self) -> None:
        """End the command and its whole session, and wait for it; a forked process only closes its pipe end."""
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
