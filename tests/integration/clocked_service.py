"""`python -m serving` whose clock for the schedule goes ahead by the seconds in a file: started by tests only."""

import functools
import os
import sys
import time
from pathlib import Path

import serving.bootstrap
from serving.__main__ import main
from serving.generations.nights import Nights

AHEAD_FILE = "CLOCKED_AHEAD"


def ahead(file: Path) -> float:
    """The time that the schedule is told, Unix seconds."""
    return time.time() + float(file.read_text())


if __name__ == "__main__":
    clock = functools.partial(ahead, Path(os.environ[AHEAD_FILE]))
    vars(serving.bootstrap)["Nights"] = functools.partial(Nights, clock=clock)
    sys.exit(main())
