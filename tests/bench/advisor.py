"""How well the size advisor predicts L1, and what it costs.

- `max_error_points`: the largest difference, in points, of its hit ratio to that of an exact LRU simulation, at cache
  sizes of 1 % of the keys and more, over several seeds of the sample; `max_error_points_small`: the same from 0.1 %. On
  the trace `orm-busy` if LARDER_BENCH_DATA names the folder that holds `traces/`, else on a stream of Zipf.
- `max_error_points_public`, `max_error_points_public_small`: the same against libCacheSim's LRU, over ten traces that
  others published (`tests/bench/judges/public_traces.py` says where they are from); `..._quarter` with a quarter of
  the keys sampled. `make judges-env` installs libCacheSim, the traces have to lie in `traces/`.
- `cost_share`: what it takes of the throughput of L1 hits, by the server's processor time: 1 - with / without
  (`LARDER_ADVISOR_KEYS=0`), in the same rounds.

Sizes are in keys; both figures of accuracy stand beside the sampling rate that they were reached with.
"""

import dataclasses
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from cache.usage.miss_ratio_curve import MissRatioCurve
from serving.config.settings import ServingConfig
from tests.bench.judges.cachesim import judge
from tests.bench.judges.environment import ABSENT, is_there
from tests.bench.judges.public_traces import TRACES, missing
from tests.bench.observe import on_vs_off
from tests.bench.read_path import make_case
from tests.bench.tools.harness import Options, Promise, Ratio, Report, parse
from tests.bench.tools.place import own_server
from tests.bench.tools.topk_cases import DATA
from tests.bench.tools.traces import Keys, capacities_of, lru_hit_ratio, orm_busy, sampled, trace_file, zipf

Errors = NDArray[np.float64]

KEY_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
REPORTED_KEY_SHARES = 0.01, 0.1
IS_LARGE = np.array(KEY_SHARES) >= 0.01
FEWER = 4
"""A part of so many of the default of LARDER_ADVISOR_KEYS stands beside it."""
QUICK_READS = 200_000
"""Of each public trace, so many are judged with `--quick`."""


def accuracy(report: Report, options: Options) -> None:
    """Compare the advisor's curve with the exact one."""
    file = trace_file()
    keys = zipf(40_000, 1_000_000) if file is None else orm_busy(file)
    capacities = capacities_of(keys, KEY_SHARES)
    key_list = keys.tolist()
    exact = np.array([lru_hit_ratio(key_list, None, capacity) for capacity in capacities])
    errors, rates, spent, touches = [], [], 0.0, 0
    seeds = range(2 if options.quick else 8)
    for seed in seeds:
        shards = MissRatioCurve(capacities, ServingConfig().advisor_keys)
        cpu_start_s = time.process_time()
        sampled(keys, shards, seed=seed)
        spent += time.process_time() - cpu_start_s
        touches += shards.sampled_reads
        rates.append(shards.rate)
        errors.append(np.abs(np.array(shards.hit_ratio_by_capacity()) - exact) * 100)
    worst = np.max(errors, axis=0)
    report.figures["stream"] = "zipf 1.0" if file is None else "orm-busy"
    report.figures["reads"], report.figures["keys"] = len(keys), int(keys.max()) + 1
    report.figures["sampling rate"] = f"{min(rates):.3f} to {max(rates):.3f}"
    report.figures["seeds"] = len(seeds)
    report.figures["us per sampled read"] = spent / touches * 1e6
    for key_share, capacity, ratio, error in zip(KEY_SHARES, capacities, exact, worst, strict=True):
        name = f"{key_share:.1%} of keys ({capacity})"
        report.figures[name] = f"exact {ratio:.4f}, off by {error:.2f} points at most"
    for name, error in (
        ("max_error_points", worst[IS_LARGE].max()),
        ("max_error_points_small", worst[~IS_LARGE].max()),
    ):
        report.ratios[name] = Ratio(float(error), 1.0, len(seeds), float(error), 1.0)


def public(report: Report, options: Options) -> None:
    """Compare the advisor's curves with libCacheSim's LRU, on the traces that are available."""
    if not is_there():
        report.figures["libCacheSim"] = ABSENT
        return
    keys_max = ServingConfig().advisor_keys
    worst: dict[int, list[Errors]] = {keys_max: [], keys_max // FEWER: []}
    seeds = range(1 if options.quick else 3)
    for trace in TRACES:
        if trace.path() is None:
            continue
        keys = trace.keys()[: QUICK_READS if options.quick else None]
        capacities = capacities_of(keys, KEY_SHARES)
        report.figures["judge"], hit_ratios_by_policy = judge(keys, capacities, ("LRU",))
        lru = np.array(hit_ratios_by_policy["LRU"])
        for sampled_keys_max, errors in worst.items():
            errors.append(np.max([off(keys, capacities, sampled_keys_max, lru, seed) for seed in seeds], axis=0))
        hit_ratio_text = ", ".join(
            f"{lru[KEY_SHARES.index(key_share)]:.4f} at {key_share:.0%}" for key_share in REPORTED_KEY_SHARES
        )
        report.figures[f"{trace.name}: {len(keys):,} reads, {int(keys.max()) + 1:,} keys"] = (
            f"LRU {hit_ratio_text}; off by at most "
            + ", ".join(
                f"{errors[-1][IS_LARGE].max():.2f} points ({errors[-1].max():.2f} from 0.1 %) with "
                f"{sampled_keys_max:,} sampled"
                for sampled_keys_max, errors in worst.items()
            )
        )
    report.absent += missing()
    if not worst[keys_max]:
        return
    for sampled_keys_max, suffix in ((keys_max, ""), (keys_max // FEWER, "_quarter")):
        for name, capacity_mask in (("public", IS_LARGE), ("public_small", ~IS_LARGE)):
            error = float(np.max(worst[sampled_keys_max], axis=0)[capacity_mask].max())
            report.ratios[f"max_error_points_{name}{suffix}"] = Ratio(error, 1.0, len(seeds), error, 1.0)
    report.promises["max_error_points_public"] = Promise(maximum=1.0)


def off(keys: Keys, capacities: list[int], keys_max: int, exact: Errors, seed: int) -> Errors:
    """Return how far one sample's hit ratios are from the exact ones, in points, by capacity."""
    shards = MissRatioCurve(capacities, keys_max)
    sampled(keys, shards, seed=seed)
    error: Errors = np.abs(np.array(shards.hit_ratio_by_capacity()) - exact) * 100
    return error


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("advisor", ("fastapi", "uvicorn", "uvloop", "httptools"))
    accuracy(report, options)
    public(report, options)
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        ratio = on_vs_off(case, {"LARDER_ADVISOR_KEYS": "0"}, options)
        report.ratios["cost_share"] = dataclasses.replace(ratio, value=1 - ratio.value)
    if trace_file() is None:
        report.absent.append(f"the trace orm-busy: {DATA} names no folder that holds traces/")
    report.promises |= {
        "max_error_points": Promise(maximum=1.0, quick="two seeds instead of eight"),
        "cost_share": Promise(maximum=0.02, quick="five pairs of processes, which differ by a few per cent"),
    }
    report.show(options)


if __name__ == "__main__":
    main()
