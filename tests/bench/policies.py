"""Eviction policies beside LRU, which is what L1 does: hit ratios by libCacheSim, and what a hit costs in Python.

On ten traces that others published and on Gowalla's check-ins as requests, as far as LARDER_BENCH_DATA names a folder
that holds them, and on what the demo's traffic asks L1 for. Sizes are in keys, which is the same as bytes: records of a
table have one size.

- `<stream>.<policy>`: the mean over the sizes of its misses over those of LRU; the figures say the hit ratios.
- `<stream>.<policy>_points`: the greatest that it is ahead of LRU at one of the sizes, in points of hit ratio.
- `hit.<policy>`: time of a hit in a short Python reference of it over that of LRU.

Beside them stands what `LocalTier` itself finds, and libCacheSim's LRU of as many keys. `make judges-env` installs
libCacheSim; without it only hits are timed.
"""

import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from cache.tiers.l1 import Entry, LocalKey, LocalTier
from infra.demo.dataset import make_synthetic_data
from infra.demo.synthetic import WorldSettings
from infra.demo.traffic import RequestStream
from tests.bench.judges.cachesim import POLICIES as JUDGED
from tests.bench.judges.cachesim import judge
from tests.bench.judges.environment import ABSENT, is_there
from tests.bench.judges.public_traces import TRACES, missing
from tests.bench.tools.harness import Options, Ratio, Report, alternate, parse
from tests.bench.tools.policy import POLICIES, Policy
from tests.bench.tools.topk_cases import DATA, real_file
from tests.bench.tools.traces import Keys, capacities_of, gowalla, zipf

KEY_SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
UNREAD = frozenset({"fresh", "stranger"})
"""Requests of the demo whose answers L1 does not hold."""
KEYS_LEAST = 100
"""Smaller caches leave no room for the parts of S3-FIFO and W-TinyLFU."""
QUICK_READS = 200_000
RECORD = bytes(616)


def demo(users: int, requests: int) -> Keys:
    """Tables and ids that the demo's traffic asks for, in its order."""
    numbers: dict[tuple[str, object], int] = {}
    key_numbers = [
        numbers.setdefault((question.table_name, question.entity_id), len(numbers))
        for request in islice(RequestStream(make_synthetic_data(WorldSettings(user_count=users))), requests)
        if request.request_kind not in UNREAD
        for question in request.questions
    ]
    return np.array(key_numbers, np.int64)


def streams(quick: bool) -> Iterator[tuple[str, Keys]]:
    """Yield all streams that are on this machine, one in memory at a time."""
    reads_max = QUICK_READS if quick else None
    for trace in TRACES:
        if trace.path() is not None:
            yield trace.name, trace.keys()[:reads_max]
    file = real_file()
    if file is not None:
        for name, keys in gowalla(file).items():
            yield f"gowalla {name}", keys[:reads_max]
    yield "demo", demo(*((20_000, 200_000) if quick else (50_000, 1_000_000)))


def by_judge(report: Report, name: str, keys: Keys) -> None:
    """One stream with every policy of libCacheSim."""
    capacities = [capacity for capacity in capacities_of(keys, KEY_SHARES) if capacity >= KEYS_LEAST]
    report.figures["judge"], hit_ratios_by_policy = judge(keys, capacities)
    report.figures[f"{name}: reads, keys, sizes"] = (
        f"{len(keys):,}, {int(keys.max()) + 1:,}, {' · '.join(f'{capacity:,}' for capacity in capacities)}"
    )
    lru = np.array(hit_ratios_by_policy["LRU"])
    for policy in JUDGED:
        hits = np.array(hit_ratios_by_policy[policy])
        report.figures[f"{name}: {policy}"] = " · ".join(f"{hit_ratio:.4f}" for hit_ratio in hits)
        if policy != "LRU":
            over, ahead = float(np.mean((1 - hits) / (1 - lru))), float((hits - lru).max()) * 100
            report.ratios[f"{name}.{policy}"] = Ratio(over, 1.0, 1, over, 1.0)
            report.ratios[f"{name}.{policy}_points"] = Ratio(ahead, 1.0, 1, ahead, 0.0)


def by_l1(report: Report, name: str, keys: Keys) -> None:
    """L1 itself, with room for about a tenth of the keys, and the judge's LRU of as many as it held in the end."""
    room = capacities_of(keys, (0.1,))[0] * (len(RECORD) + 500)
    hit_ratio, record_count = l1_hit_ratio(keys, room)
    _, judged = judge(keys, (record_count,), ("LRU",))
    report.figures[f"{name}: L1 itself, {record_count:,} records in {room:,} bytes"] = (
        f"{hit_ratio:.4f}; libCacheSim's LRU of as many {judged['LRU'][0]:.4f}"
    )


def l1_hit_ratio(keys: Keys, room_bytes: int) -> tuple[float, int]:
    """What `LocalTier` finds of a stream of records of one size, and how many it holds in the end."""
    local, entry, hits = LocalTier(room_bytes), Entry(RECORD, 1), 0
    names = [LocalKey("g", "user_topk", number) for number in range(int(keys.max()) + 1)]
    for key in keys.tolist():
        if local.get(names[key]) is not None:
            hits += 1
        else:
            local.put(names[key], entry)
    return hits / len(keys), len(local)


def hits(kind: Callable[[int], Policy], keys: list[int]) -> Callable[[], float]:
    """Nanoseconds of a hit, where everything is held."""
    get = kind(max(keys) + 1).get
    for key in range(max(keys) + 1):
        get(key)

    def measure_hit_ns() -> float:
        cpu_start_s = time.process_time()
        for key in keys:
            get(key)
        return (time.process_time() - cpu_start_s) / len(keys) * 1e9

    return measure_hit_ns


def cost(report: Report, options: Options) -> None:
    """Hits of all references in the same rounds."""
    keys = zipf(10_000, 100_000 if options.quick else 500_000).tolist()
    runs = {policy: hits(kind, keys) for policy, kind in POLICIES.items()}
    baseline = runs.pop("lru")
    for policy, ratio in alternate(baseline, runs, rounds=options.rounds).items():
        report.ratios[f"hit.{policy}"] = ratio


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("policies")
    report.figures["sizes"] = " · ".join(f"{key_share:.1%} of keys" for key_share in KEY_SHARES)
    cost(report, options)
    if is_there():
        for name, keys in streams(options.quick):
            by_judge(report, name, keys)
            by_l1(report, name, keys)
        report.absent += missing()
        if real_file() is None:
            report.absent.append(f"Gowalla: {DATA} names no folder with gowalla/train.txt.gz")
    else:
        report.figures["libCacheSim"] = ABSENT
    report.show(options)


if __name__ == "__main__":
    main()
