"""Exact top-100 of all items, history excluded: the night's scorer beside FAISS flat and the bare product.

Vectors are made like a real model's: item lengths are as skewed as measured on a trained one (log-normal,
99th percentile about ten times the median), users are sums over histories of 8 to 800 items. `random` is
Gaussian, where no bound can save anything. Everything uses all cores.
"""

import time
from dataclasses import dataclass
from functools import partial

import faiss
import numpy as np
from numpy.typing import NDArray

from cache.tower import Histories
from precompute.topk import Scorer
from tests.bench.harness import Report, compare, parse

K = 100
ITEMS = 40_981
SPARES = (16, 64, 256)
BATCH = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Users, items and what each user already has."""

    users: NDArray[np.float32]
    items: NDArray[np.float32]
    histories: Histories


def make_case(users: int, dims: int, *, skewed: bool, seed: int = 0) -> Case:
    """Latent tastes with a falling spectrum, Zipf-like popularity in the lengths."""
    rng = np.random.default_rng(seed)
    spectrum = np.linspace(1, 0.3, dims, dtype=np.float32) if skewed else np.ones(dims, np.float32)
    items = rng.standard_normal((ITEMS, dims), np.float32) * spectrum
    lengths = np.clip(8 * rng.pareto(1.6, users) + 8, 8, 800).astype(np.int64)
    if skewed:
        items /= np.linalg.norm(items, axis=1, keepdims=True)
        items *= np.exp(rng.standard_normal((ITEMS, 1), np.float32))
    histories = Histories.of([rng.choice(ITEMS, count, replace=False) for count in lengths])
    if not skewed:
        return Case(rng.standard_normal((users, dims), np.float32), items, histories)
    taste = rng.standard_normal((users, dims), np.float32) * spectrum
    means = np.stack(
        [items[row].mean(axis=0) for row in np.split(histories.indices, histories.indptr[1:-1])]
    )
    scale = np.linalg.norm(means, axis=1, keepdims=True) / np.linalg.norm(
        taste, axis=1, keepdims=True
    )
    return Case((means + 0.5 * scale * taste).astype(np.float32), items, histories)


def flat_run(case: Case) -> float:
    """FAISS over-fetching by history length (K + 16, 64, 256, longest), then dropping the history."""
    index = faiss.IndexFlatIP(case.items.shape[1])
    index.add(case.items)
    lengths = np.diff(case.histories.indptr)
    spares = [*(each for each in SPARES if each < lengths.max()), int(lengths.max())]
    started = time.perf_counter()
    which = np.searchsorted(spares, lengths)
    for bucket in np.unique(which):
        rows = np.flatnonzero(which == bucket)
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH]
            scores, found = index.search(case.users[some], K + spares[bucket])
            gone = case.histories.take(some)
            owners = np.repeat(np.arange(len(some)), np.diff(gone.indptr)) * ITEMS
            banned = np.sort(owners + gone.indices)
            wanted = np.arange(len(some))[:, None] * ITEMS + found
            at = np.minimum(np.searchsorted(banned, wanted), len(banned) - 1)
            order = np.argsort(banned[at] == wanted, axis=1, kind="stable")[:, :K]
            np.take_along_axis(found, order, axis=1)
            np.take_along_axis(scores, order, axis=1)
    return len(case.users) / (time.perf_counter() - started)


def product_run(case: Case) -> float:
    """The bare matrix product in tiles of users, selecting nothing."""
    out = np.empty((512, ITEMS), np.float32)
    turned = case.items.T
    started = time.perf_counter()
    for start in range(0, len(case.users) - 511, 512):
        np.matmul(case.users[start : start + 512], turned, out=out)
    return len(case.users) // 512 * 512 / (time.perf_counter() - started)


def larder_run(case: Case, scorer: Scorer) -> float:
    """The night's scorer, exclusion, order and re-score included; preparing the items is not repeated per shard."""
    started = time.perf_counter()
    scorer.top(case.users, K, case.histories)
    return len(case.users) / (time.perf_counter() - started)


def recall_of(case: Case, scorer: Scorer, rows: int = 64) -> float:
    """Share of the float64 top 100 that the scorer finds; pairs within 1e-5 of each other count as equal."""
    some = case.histories.take(np.arange(rows))
    found, _ = scorer.top(case.users[:rows], K, some)
    good = 0
    for row in range(rows):
        exact = case.items.astype(np.float64) @ case.users[row].astype(np.float64)
        exact[some.indices[some.indptr[row] : some.indptr[row + 1]]] = -np.inf
        least = np.partition(exact, -K)[-K]
        good += int((exact[found[row].astype(np.int64)] >= least - 1e-5 * abs(least)).sum())
    return good / (rows * K)


def main() -> None:
    """Run all cases."""
    options = parse(__doc__.splitlines()[0])
    users = 2048 if options.quick else 16_384
    report = Report("topk", ("faiss-cpu",))
    report.figures |= {"users": users, "items": ITEMS, "k": K}
    shapes = {"": (256, True), "random128_": (128, False)}
    if not options.quick:
        shapes["skewed128_"] = (128, True)
    recalls = []
    for name, (dims, skewed) in shapes.items():
        case = make_case(users, dims, skewed=skewed)
        scorer = Scorer.of(case.items)
        recalls.append(recall_of(case, scorer))
        baselines = {
            "faiss_flat": partial(flat_run, case),
            "matrix_product": partial(product_run, case),
        }
        found = compare(
            baselines,
            {"larder": partial(larder_run, case, scorer)},
            rounds=options.rounds,
            rounds_max=options.rounds + (0 if options.quick else 2),
        )
        for (baseline, _), ratio in found.items():
            report.ratios[f"{name}vs_{baseline}"] = ratio
            report.figures[f"{name}users_per_second"] = round(ratio.candidate)
    report.figures["recall"] = min(recalls)
    report.show(options)


if __name__ == "__main__":
    main()
