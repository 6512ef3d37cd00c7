"""Exact top-100 of all items, history excluded: the night's scorer beside FAISS flat and the bare product.

`real128` and `real256` are a trained model's vectors (the environment variable LARDER_BENCH_DATA names the
folder of the data); without the data that is said, and `--json` fails. `random` is Gaussian, where no bound can save
anything. Rates are users per second of processor time, each run in one thread: so other programs on the
machine disturb them less, and nobody pays for threads that spin.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from cache.topk.compiled import find_kernel
from cache.topk.topk import AnyScorer, Scorer
from tests.bench.tools.harness import Promise, Ratio, Report, compare, parse
from tests.bench.tools.topk_cases import NO_DATA, Case, random_case, real_case, real_file

K = 100
ITEMS = 40_981
SPARES = (16, 64, 256)
BATCH = 4096


def flat_run(case: Case) -> float:
    """FAISS over-fetching by history length (K + 16, 64, 256, longest), then dropping the history."""
    index = faiss.IndexFlatIP(case.items.shape[1])
    index.add(case.items)
    lengths = np.diff(case.histories.indptr)
    spares = [*(spare for spare in SPARES if spare < lengths.max()), int(lengths.max())]
    started = time.process_time()
    bucket_indexes = np.searchsorted(spares, lengths)
    for bucket in np.unique(bucket_indexes):
        rows = np.flatnonzero(bucket_indexes == bucket)
        for start in range(0, len(rows), BATCH):
            batch_rows = rows[start : start + BATCH]
            scores, top_ordinals = index.search(case.users[batch_rows], K + spares[bucket])
            exclusions = case.histories.select_rows(batch_rows)
            owners = np.repeat(np.arange(len(batch_rows)), np.diff(exclusions.indptr)) * len(case.items)
            banned = np.sort(owners + exclusions.indices)
            candidate_keys = np.arange(len(batch_rows))[:, None] * len(case.items) + top_ordinals
            at = np.minimum(np.searchsorted(banned, candidate_keys), len(banned) - 1)
            order = np.argsort(banned[at] == candidate_keys, axis=1, kind="stable")[:, :K]
            np.take_along_axis(top_ordinals, order, axis=1)
            np.take_along_axis(scores, order, axis=1)
    return len(case.users) / (time.process_time() - started)


def product_run(case: Case) -> float:
    """The bare matrix product in tiles of users, selecting nothing."""
    product_buffer = np.empty((512, len(case.items)), np.float32)
    turned = case.items.T
    started = time.process_time()
    for start in range(0, len(case.users) - 511, 512):
        np.matmul(case.users[start : start + 512], turned, out=product_buffer)
    return len(case.users) // 512 * 512 / (time.process_time() - started)


def larder_run(case: Case, scorer: Scorer) -> float:
    """The night's scorer, exclusion, order and re-score included; preparing the items is not repeated per shard."""
    started = time.process_time()
    scorer.top(case.users, K, case.histories, threads=1)
    return len(case.users) / (time.process_time() - started)


def exact_scores(case: Case, rows: int) -> NDArray[np.float64]:
    """Inner products in float64 of the first users with all items, one row each."""
    return case.users[:rows].astype(np.float64) @ case.items.astype(np.float64).T


def recall_of_lists(exact: NDArray[np.float64], ordinals: NDArray[Any]) -> float:
    """Share of the K best of each row of scores that its list has; scores within 1e-5 of each other count as equal."""
    good = 0
    for scores, list_ordinals in zip(exact, ordinals, strict=True):
        kth_score = np.partition(scores, -K)[-K]
        good += int((scores[list_ordinals.astype(np.int64)] >= kth_score - 1e-5 * abs(kth_score)).sum())
    return good / (len(ordinals) * K)


def recall_of(case: Case, scorer: AnyScorer, rows: int = 64) -> float:
    """Share of the float64 top 100 that the scorer finds, items that a user had left out."""
    histories = case.histories.select_rows(np.arange(rows))
    ordinals, _ = scorer.top(case.users[:rows], K, histories)
    exact = exact_scores(case, rows)
    exact[np.repeat(np.arange(rows), np.diff(histories.indptr)), histories.indices] = -np.inf
    return recall_of_lists(exact, ordinals)


def cases(users: int, report: Report) -> Iterator[tuple[str, Case]]:
    """(name, case); real ones only where the data is."""
    file = real_file()
    if file is None:
        report.absent.append(f"real vectors (real128, real256): {NO_DATA}")
    else:
        for dims in (128, 256):
            with tempfile.TemporaryDirectory() as folder:
                yield f"real{dims}", real_case(file, Path(folder), users, dims)
    yield "random", random_case(users, ITEMS, 128)


def main() -> None:
    """Run all cases."""
    options = parse(__doc__.splitlines()[0])
    users = 2048 if options.quick else 16_384
    report = Report("topk", ("faiss-cpu",))
    engine = find_kernel()
    report.figures |= {"users": users, "k": K, "kernel_level": -1 if engine is None else engine.level}
    recalls = []
    for name, case in cases(users, report):
        started = time.process_time()
        scorer = Scorer.of(case.items)
        report.figures[f"{name}_prepare_cpu_s"] = round(time.process_time() - started, 3)
        recalls.append(recall_of(case, scorer))
        ratio_by_pair = compare(
            {"faiss": partial(flat_run, case), "matrix_product": partial(product_run, case)},
            {"larder": partial(larder_run, case, scorer)},
            rounds=options.rounds,
            rounds_max=options.rounds + 2,
        )
        for (baseline, _), ratio in ratio_by_pair.items():
            report.ratios[f"{name}_vs_{baseline}"] = ratio
            report.figures[f"{name}_users_per_cpu_s"] = round(ratio.candidate)
    report.promises = {
        "real128_vs_faiss": Promise(1.6), "real128_vs_matrix_product": Promise(1.2),
        "real256_vs_faiss": Promise(1.4), "real256_vs_matrix_product": Promise(1.0),
        "random_vs_faiss": Promise(1.0), "recall": Promise(1.0),
    }  # fmt: skip
    report.figures["recall"] = min(recalls)
    report.ratios["recall"] = Ratio(min(recalls), 1.0, 1, min(recalls), 1.0)
    report.show(options)


def in_one_thread() -> None:
    """Starts this program again unless BLAS was told to use one thread: it reads that when it is loaded."""
    thread_settings = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    if not thread_settings.items() <= os.environ.items():
        command = [sys.executable, "-m", "tests.bench.topk", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **thread_settings})  # noqa: S606 - no shell


if __name__ == "__main__":
    in_one_thread()
    main()
