"""`python -m serving` with the schedule's clock ahead by the seconds in a file: started by tests only."""

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
    """Return the time for the schedule, in Unix seconds."""
    return time.time() + float(file.read_text())


if __name__ == "__main__":
    clock = functools.partial(ahead, Path(os.environ[AHEAD_FILE]))
    vars(serving.bootstrap)["Nights"] = functools.partial(Nights, clock=clock)
    sys.exit(main())
