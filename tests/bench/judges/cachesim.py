"""Hit ratios by libCacheSim's implementations of eviction policies."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.bench.judges import cachesim_side
from tests.bench.judges.environment import run_program
from tests.bench.tools.traces import Keys

POLICIES = ("LRU", "Sieve", "S3FIFO", "WTinyLFU", "ARC")
"""Its names, with its own defaults."""
_TIMEOUT_S = 1800.0


def judge(
    keys: Keys, capacities: Sequence[int], policies: Sequence[str] = POLICIES
) -> tuple[str, dict[str, list[float]]]:
    """Return libCacheSim's version, and hit ratios by policy and capacity (in keys, all of size 1)."""
    with TemporaryDirectory(prefix="larder-bench-") as folder:
        file = Path(folder, "keys.npy")
        np.save(file, keys)
        job = {"keys": str(file), "policies": list(policies), "capacities": list(capacities)}
        judge_reply = run_program(cachesim_side.__file__, job, _TIMEOUT_S)
    return f"libcachesim {judge_reply['version']}", judge_reply["hit_ratios"]
