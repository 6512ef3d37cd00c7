"""All users' top 100 of a model of implicit: the night's scorer beside implicit's own `recommend`, both exact.

Each run scores every user against every item with the clicks left out, on the same cores: `recommend(arange,
user_items, N=100, filter_already_liked_items=True)`, and `cache.topk`, as a night's score step calls it, here with
its items prepared anew each time. `vs_implicit_recommend` has the vectors of ALS fitted on drawn clicks,
`vs_implicit_recommend_large` random ones. Rates are users per second by the clock. Before anything is timed, both lists
of every user are compared: an item on one alone has to score as the last of the other does, within 1e-5.

BLAS runs in one thread, as implicit advises: it has threads of its own.
"""

import importlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.process.host import usable_cores
from cache.topk.topk import Scorer
from tests.bench.tools.harness import Report, alternate, parse

K = 100
FACTORS = 64
SMALL = (6_040, 3_706)
LARGE, LARGE_QUICK = (50_000, 40_981), (4_096, 40_981)
CLOSE = 1e-5
INSTALL_COMMAND = "implicit: pip install implicit==0.7.3"


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A model of implicit, and the clicks that it excludes, in the form that both sides take."""

    model: Any
    clicks: sp.csr_matrix
    histories: Histories

    @classmethod
    def of(cls, als: Any, size: tuple[int, int], *, fit: bool) -> "Fitted":
        """Draw popular and rare items with short and long histories; fit ALS, or use random factors."""
        users, items = size
        rng = np.random.default_rng(0)
        lengths = np.clip(20 * rng.pareto(1.6, users) + 20, 20, 800).astype(np.int64)
        click_histories = Histories.of([
            np.unique((items * rng.random(count) ** 2.5).astype(np.int64)) for count in lengths
        ])  # fmt: skip
        ones = np.ones(len(click_histories.indices), np.float32)
        clicks = sp.csr_matrix((ones, click_histories.indices, click_histories.indptr), size)
        model = als.AlternatingLeastSquares(factors=FACTORS, iterations=5, random_state=0)
        if fit:
            model.fit(clicks, show_progress=False)
        else:
            model.user_factors = rng.standard_normal((users, FACTORS), np.float32)
            model.item_factors = rng.standard_normal((items, FACTORS), np.float32)
        return cls(model, clicks, click_histories)

    def by_implicit(self) -> NDArray[np.int64]:
        """Compute lists [users, K] by implicit."""
        users = np.arange(self.clicks.shape[0])
        ids_and_scores = self.model.recommend(users, self.clicks, N=K, filter_already_liked_items=True)
        return np.asarray(ids_and_scores[0], np.int64)

    def by_larder(self) -> NDArray[np.int64]:
        """Compute lists [users, K] by the night's scorer."""
        scorer = Scorer.of(self.model.item_factors)
        return scorer.top(self.model.user_factors, K, self.histories)[0].astype(np.int64)

    def overlap(self) -> float:
        """Share of implicit's lists that ours hold; items that score as the last one does count as equal."""
        theirs, larder_lists = self.by_implicit(), self.by_larder()
        missing = 0
        differ = np.flatnonzero((np.sort(theirs, axis=1) != np.sort(larder_lists, axis=1)).any(axis=1))
        for row in differ:
            user = self.model.user_factors[row].astype(np.float64)
            last = float((self.model.item_factors[theirs[row]] @ user).min())
            alone = np.setxor1d(theirs[row], larder_lists[row])
            scores = self.model.item_factors[alone] @ user
            missing += int((np.abs(scores - last) > CLOSE * abs(last)).sum()) + len(
                np.intersect1d(larder_lists[row], self.clicks[row].indices)
            )
        return 1.0 - missing / theirs.size


def rate(run: Any, users: int) -> float:
    """Users per second."""
    started = time.perf_counter()
    run()
    return users / (time.perf_counter() - started)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__.splitlines()[0])
    report = Report("adapters", ("implicit", "scipy"))
    try:
        als = importlib.import_module("implicit.als")
        importlib.import_module("threadpoolctl").threadpool_limits(1, "blas")
    except ImportError:
        report.absent.append(INSTALL_COMMAND)
        report.show(options)
        return
    report.figures |= {"k": K, "factors": FACTORS, "cores": usable_cores()}
    large = LARGE_QUICK if options.quick else LARGE
    for name, size, fit in (("", SMALL, True), ("_large", large, False)):
        fitted = Fitted.of(als, size, fit=fit)
        overlap = fitted.overlap()
        if overlap < 1:
            raise RuntimeError(f"lists of {size} share {overlap:.6f}: they have to be the same")
        report.figures |= {f"size{name}": f"{size[0]:,} x {size[1]:,}", f"overlap{name}": overlap}
        ratio_by_name = alternate(
            lambda fitted=fitted, users=size[0]: rate(fitted.by_implicit, users),  # type: ignore[misc]
            {"larder": lambda fitted=fitted, users=size[0]: rate(fitted.by_larder, users)},  # type: ignore[misc]
            rounds=options.rounds,
        )
        report.ratios[f"vs_implicit_recommend{name}"] = ratio_by_name["larder"]
    report.show(options)


if __name__ == "__main__":
    main()
