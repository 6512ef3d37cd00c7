"""The service of any checkout (LARDER_CHECKOUT) with random numbers from a fixed seed.

Two services that are asked the same then draw the same: which near answers are audited depends on it.
"""

import os
import random
import runpy
import sys
from typing import Any

_SEED = 20_261_128


class SeededRandom(random.Random):
    """Random numbers that are the same in every process, unless a seed is named."""

    def __init__(self, seed: Any = _SEED) -> None:
        super().__init__(_SEED if seed is None else seed)


def main() -> None:
    """Run `python -m serving` of the checkout in this process."""
    random.seed(_SEED)
    random.Random = SeededRandom  # type: ignore[assignment, misc]
    sys.path.insert(0, os.environ["LARDER_CHECKOUT"])
    runpy.run_module("serving", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
