"""Eviction policies beside LRU: miss ratios at several sizes, and what a read costs, each as a short Python reference.

On the trace `orm-busy` (if LARDER_BENCH_DATA names the folder that holds `traces/`) and on what the demo's traffic asks
L1 for. Sizes are in keys. `<stream>.<policy>` is the mean over the sizes of its misses over those of LRU.
"""

import time
from itertools import islice

import numpy as np

from infra.demo.dataset import synthetic
from infra.demo.synthetic import World
from infra.demo.traffic import Stream
from tests.bench.tools.harness import Ratio, Report, parse
from tests.bench.tools.policy import POLICIES
from tests.bench.tools.traces import Keys, capacities_of, orm_busy, trace_file

SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
UNREAD = frozenset({"fresh", "stranger"})
"""Requests of the demo whose answers L1 does not hold."""


def demo(users: int, requests: int) -> Keys:
    """Tables and ids that the demo's traffic asks for, in its order."""
    numbers: dict[tuple[str, object], int] = {}
    asked = [
        numbers.setdefault((question.table, question.id), len(numbers))
        for request in islice(Stream(synthetic(World(users=users))), requests)
        if request.kind not in UNREAD
        for question in request.questions
    ]
    return np.array(asked, np.int64)


def measure(report: Report, name: str, keys: Keys) -> None:
    """One stream with every policy."""
    listed = keys.tolist()
    report.figures[f"{name}: reads, keys"] = f"{len(keys):,}, {int(keys.max()) + 1:,}"
    misses: dict[str, list[float]] = {}
    for policy, kind in POLICIES.items():
        shown = []
        for capacity in capacities_of(keys, SHARES):
            get = kind(capacity).get
            began = time.process_time()
            hits = sum(map(get, listed))
            ns = (time.process_time() - began) / len(listed) * 1e9
            misses.setdefault(policy, []).append(1 - hits / len(listed))
            shown.append(f"{1 - hits / len(listed):.4f} ({ns:.0f} ns)")
        report.figures[f"{name}: {policy}"] = " · ".join(shown)
        over = float(np.mean(np.array(misses[policy]) / np.array(misses["lru"])))
        report.ratios[f"{name}.{policy}"] = Ratio(over, 1.0, 1, over, 1.0)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("policies")
    report.figures["sizes"] = " · ".join(f"{share:.1%} of keys" for share in SHARES)
    file = trace_file()
    if file is not None:
        keys = orm_busy(file)
        measure(report, "orm-busy", keys[: 1_000_000 if options.quick else None])
    users, requests = (20_000, 200_000) if options.quick else (50_000, 1_000_000)
    measure(report, "demo", demo(users, requests))
    report.show(options)


if __name__ == "__main__":
    main()
