"""Fuzz target of the compiled top-K at one instruction set, compared with FAISS and NumPy bit for bit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.topk import compiled
from cache.topk.topk import Scorer
from tests.fuzz.columns import Different
from tests.fuzz.given import FuzzInput


def target(folder: Path) -> Callable[[bytes], None]:
    """Run one case: the fuzzer's bytes choose sizes, the kind of numbers, and some of the numbers."""
    loaded_kernel = compiled.load_kernel({}, folder)
    assert loaded_kernel is not None
    engines = [compiled.Kernel(loaded_kernel.library, level) for level in range(loaded_kernel.level + 1)]

    def call(data: bytes) -> None:
        fuzz_input = FuzzInput(data)
        engine = engines[fuzz_input.number(0, len(engines) - 1)]
        items, dims, users = (fuzz_input.number(1, 1_400), fuzz_input.number(1, 40), fuzz_input.number(1, 35))
        k = fuzz_input.number(1, 120)
        metric: Metric = "cosine" if fuzz_input.is_true() else "inner_product"
        rng = np.random.default_rng(fuzz_input.number(0, 2**32 - 1))
        vectors = rng.standard_normal((items, dims), np.float32)
        queries = rng.standard_normal((users, dims), np.float32)
        shape = fuzz_input.number(0, 255)
        if shape & 1:  # many ties
            vectors, queries = np.rint(vectors), np.rint(queries)
        if shape & 2:  # one long component
            vectors[:, 0] *= 100
        if shape & 4:  # no direction
            vectors[rng.random(items) < 0.2] = 0
            queries[rng.random(users) < 0.2] = 0
        if shape & 8:  # lengths of many sizes
            vectors *= np.exp2(rng.integers(-60, 30, (items, 1))).astype(np.float32)
        if shape & 16:  # all alike
            vectors[:] = vectors[0]
        if shape & 32:
            queries *= np.exp2(rng.integers(-30, 30, (users, 1))).astype(np.float32)
        allowed = rng.random(items) < fuzz_input.number(0, 100) / 100 if shape & 64 else None
        excluded_ordinals = (
            [rng.integers(-2, items + 3, fuzz_input.number(0, 60)) for _ in range(users)] if shape & 128 else None
        )
        for _ in range(fuzz_input.number(0, 12)):
            value = fuzz_input.array("<f4", 1)[0]
            value = value if np.isfinite(value) and abs(value) < 1e15 else np.float32(0)
            vectors[fuzz_input.number(0, items - 1), fuzz_input.number(0, dims - 1)] = value
        excluded = Histories.of(excluded_ordinals) if excluded_ordinals is not None else None
        with np.errstate(all="ignore"):
            mine = Scorer.of(vectors, metric, engine=engine).top(queries, k, excluded, allowed=allowed)
            reference_top = Scorer.of(vectors, metric, engine=False).top(queries, k, excluded, allowed=allowed)
        if not np.array_equal(mine[0], reference_top[0]):
            raise Different(f"ordinals differ: {data!r}")
        if not np.array_equal(mine[1].view(np.uint32), reference_top[1].view(np.uint32)):
            raise Different(f"scores differ: {data!r}")

    return call
