"""New items among a list that is computed: 1,024 of them beside 100,000 items (quick: 20,000) of 64 dimensions.

- `with_new_vs_without`: lists per second of one user by the exact search and with the new items put in, over those by
  the search alone.

Figures: milliseconds of each, and of the new items alone.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from cache.model.new_items import EligibleNewItems, NewItem, NewItems, merge_new_items
from cache.records import Layout
from cache.topk.topk import Scorer
from tests.bench.tools.harness import Options, Report, alternate, parse

ITEMS, QUICK_ITEMS, NEW, DIMS, K = 100_000, 20_000, 1_024, 64, 100
LAYOUT = Layout("topk", K, "f2")


def measure(report: Report, options: Options) -> None:
    """In this process, on one thread."""
    rng = np.random.default_rng(0)
    count = QUICK_ITEMS if options.quick else ITEMS
    scorer = Scorer.of(rng.standard_normal((count, DIMS)).astype(np.float32))
    users = rng.standard_normal((64, DIMS)).astype(np.float32)
    vectors = rng.standard_normal((NEW, DIMS)).astype(np.float32)
    items = tuple(NewItem(b"new-%d" % at, at + 1) for at in range(NEW))
    new = [EligibleNewItems(NewItems(count, items, vectors, tuple(row.tobytes() for row in vectors)))]
    times: dict[str, list[float]] = {"without": [], "with": [], "new items alone": []}

    def timed(name: str, work: Callable[[], object]) -> float:
        started = perf_counter()
        work()
        times[name].append(1e3 * (perf_counter() - started))
        return 1e3 / times[name][-1]

    def user() -> np.ndarray:
        return users[[int(rng.integers(len(users)))]]

    def without() -> float:
        user_vector = user()
        return timed("without", lambda: scorer.top(user_vector, K, threads=1))

    def with_new() -> float:
        user_vector = user()
        return timed(
            "with",
            lambda: merge_new_items(scorer.top(user_vector, K, threads=1), user_vector, new, "inner_product", LAYOUT),
        )

    ratio_by_name = alternate(without, {"with": with_new}, rounds=max(51, options.rounds))
    report.ratios["with_new_vs_without"] = ratio_by_name["with"]
    for _ in range(51):
        user_vector = user()
        top_lists = scorer.top(user_vector, K, threads=1)
        merge = partial(merge_new_items, top_lists, user_vector, new, "inner_product", LAYOUT)
        timed("new items alone", merge)
    for name, durations_ms in times.items():
        report.figures[f"{name}: milliseconds"] = round(median(durations_ms), 3)
    report.figures["items"], report.figures["new items"] = count, NEW


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("new_items", ("numpy",))
    measure(report, options)
    report.show(options)


if __name__ == "__main__":
    main()
