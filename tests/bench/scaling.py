"""How the night's cost grows: processor time of scoring over users and over items, peak memory of each step over users.

Four sizes each (nights with `--quick`: two), doubling. `users_exponent` and `items_exponent`: slopes of log time over
log size (least squares) of the exact top 100 of Gaussian vectors, where no bound helps: 1 is linear; their A/A compares
the first half of the repetitions with the second. `cost_of_another_user` is what one user more costs a night (processor
time, Parquet to pages) between the two largest sizes, over the same between the two smallest. `peak_last_doubling` is
the peak memory at the most users over that at half of them, of the step where it grows most. Each step runs in a
process of its own, and the number of shards grows with the users, as a night's does.

Then resident memory of every step, up to the verified generation, while users (in one shard), items and the width of
the users' features grow, each in turn. `peak_over_foretold` is the largest share of what `plan` foretells for a step
(`precompute.planning.sizes`) that a step took: 1 at most.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cache.errors import Refused
from cache.process.redis_server import join_or_start_server
from cache.topk.topk import Scorer
from precompute.builds.reports import BegunBuild, BuildId
from precompute.config.settings import NightConfig, Sources, TableConfig
from precompute.planning.sizes import step_bytes
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score, verify
from tests.bench.night import DATA_UNTIL, drawn_case, write_interactions
from tests.bench.tools import wide_night
from tests.bench.tools.harness import Options, Ratio, Report, parse
from tests.bench.tools.topk_cases import random_case
from tests.bench.tools.wide_night import CASE, Case

K = 100
DIMS = 128
SIZES = 4
USERS, ITEMS = 4_096, 10_000
STEPS = ("begin", "embed_items", "score", "assemble")
MORE_STEPS = (*STEPS, "index", "quantize", "load", "verify")
GROWN = {
    "users": [Case(users, 20_000, 8) for users in (50_000, 100_000, 200_000)],
    "items": [Case(5_000, items, 8) for items in (50_000, 100_000, 200_000)],
    "width": [Case(50_000, 20_000, width) for width in (64, 512, 2_048)],
}
GROWN_QUICK = {
    "users": [Case(users, 5_000, 8) for users in (10_000, 20_000)],
    "items": [Case(2_000, items, 8) for items in (10_000, 20_000)],
    "width": [Case(5_000, 5_000, width) for width in (64, 512)],
}
COPIES = 2
"""Of the users, in one file."""
SHARD_USERS = 30_000
MIB = 1 << 20
LATER: dict[str, Callable[[NightConfig, BuildId], object]] = {
    "index": index.run, "quantize": quantize.run, "load": load.run, "verify": verify.run,
}  # fmt: skip


def times(sizes: Sequence[tuple[int, int]], repeats: int) -> list[list[float]]:
    """Processor seconds of scoring (users, items), one list per size."""
    largest_case = random_case(max(users for users, _ in sizes), max(items for _, items in sizes), DIMS)
    seconds_by_size: list[list[float]] = [[] for _ in sizes]
    scorers = [Scorer.of(largest_case.items[:items]) for _, items in sizes]
    for number in range(repeats + 1):
        for size_index, (users, _items) in enumerate(sizes):
            started = time.process_time()
            scorers[size_index].top(largest_case.users[:users], K, threads=1)
            if number:  # the first warms
                seconds_by_size[size_index].append(time.process_time() - started)
    return seconds_by_size


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log time over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def growth(sizes: Sequence[int], seconds_by_size: Sequence[Sequence[float]]) -> Ratio:
    """An exponent, and that of the first half of the repetitions over that of the second."""
    half = len(seconds_by_size[0]) // 2
    halves = [
        exponent(sizes, [min(repetitions_s[part]) for repetitions_s in seconds_by_size])
        for part in (slice(half), slice(half, None))
    ]
    full_exponent = exponent(sizes, [min(repetitions_s) for repetitions_s in seconds_by_size])
    return Ratio(
        full_exponent, halves[0] / halves[1], len(seconds_by_size[0]), statistics.median(seconds_by_size[-1]),
        statistics.median(seconds_by_size[0])
    )  # fmt: skip


def run_step(folder: Path, step: str) -> None:
    """One step of the night in this process; prints its processor seconds and its peak memory."""
    is_wide = (folder / CASE).exists()
    config = wide_night.config_of(folder, os.environ["REDIS_URL"]) if is_wide else config_of(folder)
    if step != "begin":
        build: BegunBuild = json.loads((folder / "build.json").read_text())
    cpu_start_s = time.process_time()
    if step == "begin":
        build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    elif step == "embed_items":
        embed_items.run(config, build)
    elif step == "score":
        for shard in build["shards"]:
            score.run_shard(config, build, shard)
    elif step == "assemble":
        assemble.run(config, build)
    else:
        with suppress(Refused):  # drawn data may fail a gate: what the step took is told all the same
            LATER[step](config, build)
    if step == "begin":
        (folder / "build.json").write_text(json.dumps(build))
    spent = time.process_time() - cpu_start_s
    print(json.dumps({"seconds": spent, "peak": peak_bytes()}))


def peak_bytes() -> int:
    """Most memory that this process held; `ru_maxrss` begins with that of the process it was forked from."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def config_of(folder: Path) -> NightConfig:
    """The night of one size, in a folder of its own; the bundle is shared."""
    users = int(folder.name)
    return NightConfig(
        artifacts=str(folder / "artifacts"),
        state=str(folder / "state"),
        bundle=str(folder.parent / "bundle"),
        redis_url=os.environ["REDIS_URL"],
        shards=max(1, users // SHARD_USERS),
        sources=Sources((str(folder / "*.parquet"),)),
        tables={"user_topk": TableConfig("user_topk", k=K)},
    )


def nights(report: Report, folder: Path, options: Options) -> None:
    """Time and peak memory of every step over four numbers of users."""
    case = drawn_case(folder / "bundle")
    users_per_copy = len(case.histories)
    copies = [1, 2] if options.quick else [COPIES << doubling for doubling in range(SIZES)]
    seconds: list[float] = []
    peaks: dict[str, list[float]] = {step: [] for step in STEPS}
    for number in copies:
        night_folder = folder / str(users_per_copy * number)
        night_folder.mkdir()
        for first in range(0, number, COPIES):
            path = night_folder / f"{first:02d}.parquet"
            write_interactions(path, case.histories, min(COPIES, number), first)
        spent = 0.0
        for step in STEPS:
            step_report = in_process(night_folder, step)
            spent += step_report["seconds"]
            peaks[step].append(step_report["peak"] / MIB)
        seconds.append(spent)
    for step, step_peaks in peaks.items():
        report.figures[f"peak MiB, {step}"] = " / ".join(f"{value:.0f}" for value in step_peaks)
    users = [users_per_copy * number for number in copies]
    report.figures["night's users"] = " / ".join(f"{count:,}" for count in users)
    report.figures["night's CPU s"] = " / ".join(f"{value:.1f}" for value in seconds)
    report.figures["night's steps"] = ", ".join(STEPS)
    marginal = np.diff(seconds) / np.diff(users)
    report.ratios["cost_of_another_user"] = Ratio(
        float(marginal[-1] / marginal[0]) if len(marginal) > 1 else 1.0, 1.0, len(users),
        float(marginal[-1]), float(marginal[0]),
    )  # fmt: skip
    worst = max(STEPS, key=lambda step: peaks[step][-1] / peaks[step][-2])
    half, last = peaks[worst][-2:]
    report.figures["grows most"] = worst
    report.ratios["peak_last_doubling"] = Ratio(last / half, 1.0, len(users), last, half)


def memory(report: Report, folder: Path, options: Options) -> None:
    """Peak memory of every step while one of users, items and width grows, beside what is foretold."""
    worst, rounds = (0.0, 0.0, 1.0, ""), 0
    for axis, cases in (GROWN_QUICK if options.quick else GROWN).items():
        peaks: dict[str, list[float]] = {step: [] for step in MORE_STEPS}
        for number, case in enumerate(cases):
            case_folder = folder / f"{axis}-{number}"
            wide_night.write_case(case_folder, case)
            foretold = step_bytes(wide_night.shape_of(case_folder, wide_night.config_of(case_folder, "")))
            for step in MORE_STEPS:
                peak = in_process(case_folder, step)["peak"]
                peaks[step].append(peak / MIB)
                worst = max(worst, (peak / foretold[step], peak, foretold[step], f"{step} by {axis}"))
                rounds += 1
            shutil.rmtree(case_folder)
        grown = " / ".join(f"{getattr(case, axis):,}" for case in cases)
        report.figures[f"memory over {axis}"] = grown
        for step, step_peaks in peaks.items():
            peaks_text = " / ".join(f"{value:.0f}" for value in step_peaks)
            report.figures[f"peak MiB, {step}, by {axis}"] = peaks_text
    report.figures["nearest to what is foretold"] = worst[3]
    report.ratios["peak_over_foretold"] = Ratio(worst[0], 1.0, rounds, worst[1] / MIB, worst[2] / MIB)


def in_process(folder: Path, step: str) -> dict[str, float]:
    """Run a step in a process of its own; return its results."""
    command = [sys.executable, "-m", "tests.bench.scaling", "--step", step, str(folder)]
    completed_process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if completed_process.returncode:
        raise RuntimeError(f"{step}: {completed_process.stderr[-2000:]}")
    step_report: dict[str, float] = json.loads(completed_process.stdout.splitlines()[-1])
    return step_report


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == ["--step"]:
        run_step(Path(sys.argv[3]), sys.argv[2])
        return
    options = parse(__doc__ or "")
    report = Report("scaling", ("faiss-cpu", "onnxruntime", "pyarrow"))
    scale = 1 if options.quick else 2
    users = [scale * USERS << doubling for doubling in range(SIZES)]
    items = [scale * ITEMS << doubling for doubling in range(SIZES)]
    report.figures["users"] = " / ".join(f"{count:,}" for count in users)
    report.figures["items"] = " / ".join(f"{count:,}" for count in items)
    by_users = times([(count, items[0]) for count in users], options.rounds)
    by_items = times([(users[0], count) for count in items], options.rounds)
    report.ratios["users_exponent"] = growth(users, by_users)
    report.ratios["items_exponent"] = growth(items, by_items)
    with TemporaryDirectory(prefix="larder-bench-") as folder_name:
        folder = Path(folder_name)
        (folder / "redis").mkdir()
        with join_or_start_server(folder / "redis") as running:
            os.environ["REDIS_URL"] = running.url
            nights(report, folder, options)
            memory(report, folder, options)
    report.show(options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
