import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cache.process.child_process import GuardedCommand
from tests.polling import poll_until

ROOT = Path(__file__).parents[4]
# A command with one child in its process group and one in a group of its own, as Airflow's tasks have.
APART = "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(600)"
FAMILY = f"""
sh -c 'echo $$ > child; exec sleep 600' &
{sys.executable} -c '{APART}' > apart &
echo $$ > parent; wait
"""
OWNER = """
import sys, time
from pathlib import Path
from cache.process.child_process import GuardedCommand
process = GuardedCommand(["sh", "-c", sys.argv[1]], log_path=Path("log"), grace_s=1.0)
print(process.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    if not Path("/proc/self").exists():
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return state.strip() != "" and not state.startswith("Z")
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while being read
        return False


def family(folder: Path) -> list[int]:
    files = [folder / name for name in ("parent", "child", "apart")]
    assert poll_until(lambda: all(file.exists() and file.read_text().strip() for file in files))
    return [int(file.read_text()) for file in files]


def owner_of_a_family(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, FAMILY],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("end_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_and_its_children_end_with_their_owner(end_signal: signal.Signals, tmp_path: Path) -> None:
    with owner_of_a_family(tmp_path) as owner:
        pids = family(tmp_path)
        assert all(alive(pid) for pid in pids)

        owner.send_signal(end_signal)
        owner.wait()

    assert poll_until(lambda: not any(alive(pid) for pid in pids))


def test_stopping_ends_the_whole_session_and_can_be_repeated(tmp_path: Path) -> None:
    process = GuardedCommand(["sh", "-c", FAMILY], log_path=tmp_path / "log", cwd=tmp_path)
    pids = family(tmp_path)
    assert process.is_running

    process.stop()
    process.stop()

    assert not process.is_running
    assert poll_until(lambda: not any(alive(pid) for pid in pids))  # killed, but perhaps not yet gone


def test_a_command_that_ignores_term_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo $$ > parent; while :; do sleep 1; done"
    process = GuardedCommand(["sh", "-c", stubborn], log_path=tmp_path / "log", cwd=tmp_path, grace_s=0.2)
    assert poll_until(lambda: (tmp_path / "parent").exists())

    process.stop()

    assert not process.is_running


def test_an_ended_command_reports_its_status_and_its_last_words(tmp_path: Path) -> None:
    with GuardedCommand(["sh", "-c", "echo no disk; exit 3"], log_path=tmp_path / "log") as process:
        assert poll_until(lambda: not process.is_running)

        assert process.returncode == 3
        assert process.log_tail() == "no disk"


def test_ctrl_c_in_the_terminal_does_not_reach_the_command(tmp_path: Path) -> None:
    with GuardedCommand(["sleep", "600"], log_path=tmp_path / "log") as process:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        assert os.getsid(process.pid) != os.getsid(0)


def test_a_forked_child_neither_stops_the_command_nor_keeps_it_alive(tmp_path: Path) -> None:
    forking = OWNER.replace(
        "print(", "import os\nif os.fork() == 0:\n    process.stop(); time.sleep(60); os._exit(0)\nprint("
    )
    with subprocess.Popen(
        [sys.executable, "-c", forking, FAMILY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as owner:
        try:
            pids = family(tmp_path)
            assert owner.stdout is not None
            assert owner.stdout.readline()
            assert all(alive(pid) for pid in pids)

            owner.kill()

            assert poll_until(lambda: not any(alive(pid) for pid in pids))
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
