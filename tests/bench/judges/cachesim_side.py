"""Replays a stream of keys through libCacheSim; runs in its own environment, where nothing of this project is imported.

The job on standard input: `keys`, an .npy file of numbers from 0; `policies`, names of its classes; `capacities`, in
keys. The answer: its version, and hit ratios of caches that are empty at first, by policy and capacity.
"""

import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ORACLE = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""A request in the format that it calls oracleGeneral, without looks into the future."""


def write_trace(keys: "np.typing.NDArray[np.int64]", path: Path) -> None:
    """Write a trace in which all objects have size 1."""
    requests = np.zeros(len(keys), ORACLE)
    requests["time"], requests["size"], requests["next"] = np.arange(len(keys)), 1, -1
    requests["key"] = keys + 1
    requests.tofile(path)


def main() -> None:
    """Answer one job."""
    job: dict[str, Any] = json.load(sys.stdin)
    judge = import_module("libcachesim")
    hit_ratios_by_policy: dict[str, list[float]] = {}
    with TemporaryDirectory(prefix="larder-bench-") as folder:
        path = Path(folder, "trace.oracleGeneral")
        write_trace(np.load(job["keys"]), path)
        for policy in job["policies"]:
            for capacity in job["capacities"]:
                reader = judge.TraceReader(str(path), judge.TraceType.ORACLE_GENERAL_TRACE, judge.ReaderInitParam())
                missed, _ = getattr(judge, policy)(capacity).process_trace(reader)
                hit_ratios_by_policy.setdefault(policy, []).append(1 - missed)
    print(json.dumps({"version": version("libcachesim"), "hit_ratios": hit_ratios_by_policy}))


if __name__ == "__main__":
    main()
