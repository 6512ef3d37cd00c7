"""Regrouping: a model's rows must not depend on which others they are computed beside, or nothing of it is copied."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cache.model.tower import Inputs, rows_of, rows_taken

ROWS = 512
"""Rows of a sample that are computed once more in other company."""
_GROUPS = (1, 2, 3, 7, 33, 130)
_SEED = 0


def is_regrouped_alike(run: Callable[[Inputs], NDArray[np.float32]], inputs: Inputs) -> bool:
    """True if the first rows have the same bits together, in another order, and in groups of several sizes."""
    count = min(ROWS, rows_of(inputs))
    batch_outputs = run(rows_taken(inputs, np.arange(count)))
    order = np.random.default_rng(_SEED).permutation(count)
    shuffled, start = [], 0
    for size in (*_GROUPS, count):
        rows = order[start : start + size]
        if len(rows):
            shuffled.append(run(rows_taken(inputs, rows)))
        start += size
    regrouped_outputs = np.concatenate(
        [np.empty((0, *batch_outputs.shape[1:]), np.float32), *shuffled]
    )
    return regrouped_outputs.tobytes() == batch_outputs[order].tobytes()
