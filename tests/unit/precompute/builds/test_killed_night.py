"""A night that was killed is told from one that runs, by the lock that the system ends with the process."""

import subprocess
import sys
from pathlib import Path

from precompute.builds.night_failure import find_killed_step, forget_failure, hold_running_file
from precompute.config.settings import NightConfig

_NIGHT = """
import sys, time
from pathlib import Path
from precompute.builds.night_failure import hold_running_file
from precompute.config.settings import NightConfig

with hold_running_file(NightConfig(state=sys.argv[1] + "/state")) as note_step:
    note_step("load", "20261129T051732Z-f2e2dce98b75")
    print("loads", flush=True)
    time.sleep(60)
"""


def test_a_killed_night_is_told_until_another_is_done(tmp_path: Path) -> None:
    config = NightConfig(state=str(tmp_path / "state"))
    command = [sys.executable, "-c", _NIGHT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as night:
        assert night.stdout is not None and night.stdout.readline() == "loads\n"
        assert find_killed_step(config) is None  # it runs
        night.kill()

    assert find_killed_step(config) == "load (20261129T051732Z-f2e2dce98b75)"
    forget_failure(config)
    assert find_killed_step(config) is None


def test_a_night_that_ends_leaves_no_file(tmp_path: Path) -> None:
    config = NightConfig(state=str(tmp_path / "state"))

    with hold_running_file(config) as note_step:
        note_step("begin", None)
        note_step("score", "g")

    assert find_killed_step(config) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
