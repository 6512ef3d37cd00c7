"""Child process that ends when its parent ends, for whatever reason."""

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

# The shell holds the reading end of a pipe. The kernel closes a writing end when its process dies, even by kill -9, and
# `read` fails once the last one is closed; a written line only proves that the shell still reads. The whole session is
# ended, not only the process group, since Airflow puts each task into a separate group. A trap handler, unlike an
# ignored signal, is not inherited, so only the shells survive the TERM that they send.
_GUARD_SCRIPT = """
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

_open_writing_ends: "weakref.WeakSet[PipeWritingEnd]" = weakref.WeakSet()


@cache
def _close_ends_in_children() -> None:
    """Make forked children close the pipes: a living child must not keep the server of a dead parent alive."""

    def close_all() -> None:
        for end in list(_open_writing_ends):
            end.close()

    os.register_at_fork(after_in_child=close_all)


class PipeWritingEnd:
    """Writing end of a guard's pipe: the command runs while at least one is open."""

    def __init__(self, descriptor: int) -> None:
        """Take ownership of `descriptor`."""
        self._descriptor = descriptor
        _close_ends_in_children()
        _open_writing_ends.add(self)

    def close(self) -> None:
        """Close the end; further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class NamedPipe:
    """Named pipe by which other processes keep a guarded command alive.

    Callers of `open_ends`, `join` and `is_held` must hold a common lock.
    """

    def __init__(self, pipe_path: Path) -> None:
        """Set the path; does not create the pipe."""
        self.path = pipe_path

    def create(self) -> bool:
        """Create a new pipe at the path; return False if the file system does not support pipes."""
        self.path.unlink(missing_ok=True)
        try:
            os.mkfifo(self.path, 0o600)
        except OSError:
            return False
        return True

    def open_ends(self) -> tuple[int, int]:
        """Open a reading and a writing end."""
        # Blocking opens would wait for each other.
        reading_end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            writing_end = os.open(self.path, os.O_WRONLY)
        except BaseException:
            os.close(reading_end)
            raise
        os.set_blocking(reading_end, True)
        return reading_end, writing_end

    def join(self, is_running: Callable[[], bool], *, wait_s_max: float) -> PipeWritingEnd | None:
        """Open another writing end; None if the guard has seen the last one closed, or does not run.

        A guard that has seen this ends the command, even if writing ends are opened afterwards. Therefore write a line:
        only a guard that still waits for the pipe's end reads it.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None
        writing_end = PipeWritingEnd(descriptor)
        give_up_at_s = time.monotonic() + wait_s_max
        try:
            os.write(descriptor, b"\n")
            while _unread_bytes(descriptor) and is_running() and time.monotonic() < give_up_at_s:
                time.sleep(0.005)
            if not _unread_bytes(descriptor):
                return writing_end
        except BrokenPipeError:
            pass
        except BaseException:
            writing_end.close()
            raise
        writing_end.close()
        return None

    def is_held(self) -> bool:
        """Return whether any process has a writing end open."""
        try:
            reading_end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return os.read(reading_end, 1) != b""
        except BlockingIOError:
            return True
        finally:
            os.close(reading_end)


def _unread_bytes(descriptor: int) -> int:
    unread_count = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, unread_count)
    return unread_count[0]


class GuardedCommand:
    """Command in its own session, which ends with all its processes when this process ends.

    Ctrl-C in the terminal does not reach it: its owner calls `stop`. With a named pipe it continues until the last
    process that has joined the pipe ends.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 10.0,
        pipe: NamedPipe | None = None,
    ) -> None:
        """Start `command` with its output appended to `log_path`; a stop sends TERM first, KILL after `grace_s`."""
        self.command = tuple(str(part) for part in command)
        self.log_path = log_path
        self._grace_s = grace_s
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._owner_pid = os.getpid()
        reading_end, writing_end = os.pipe() if pipe is None else pipe.open_ends()
        self._pipe_end = PipeWritingEnd(writing_end)
        try:
            with log_path.open("ab") as log_file:
                self._guard_process = subprocess.Popen(
                    ["sh", "-c", _GUARD_SCRIPT, "guard", str(int(grace_s * 10)), *self.command],
                    stdin=reading_end,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    env=None if env is None else dict(env),
                    cwd=cwd,
                    start_new_session=True,
                )
        except BaseException:
            self.close_pipe_end()
            raise
        finally:
            os.close(reading_end)

    @property
    def pid(self) -> int:
        """Process id of the guard; also the id of the command's process group."""
        return self._guard_process.pid

    @property
    def is_running(self) -> bool:
        """True while the command runs."""
        return self._guard_process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the command; None while it runs."""
        return self._guard_process.poll()

    def log_tail(self, line_count: int = 20) -> str:
        """Return the last lines of the log, for an error message."""
        with suppress(FileNotFoundError):
            return "\n".join(self.log_path.read_text("utf-8", "replace").splitlines()[-line_count:])
        return ""

    def close_pipe_end(self) -> None:
        """Close this process's end of the pipe; when no process holds an end any more, the guard ends its session."""
        self._pipe_end.close()

    def stop(self) -> None:
        """End the command and its whole session and wait for it; in a forked process, only close its pipe end."""
        self.close_pipe_end()
        if os.getpid() != self._owner_pid:
            return
        try:
            self._guard_process.wait(timeout=self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard_process.pid, signal.SIGKILL)
            self._guard_process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
