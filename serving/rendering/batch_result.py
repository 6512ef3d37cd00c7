"""Request and result of a batch, before it is written in any form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import Table
from serving.generations.served_set import ServedGenerations
from serving.rendering.answer_fields import AnswerJson
from serving.requests.models import RequestOptions


@dataclass(frozen=True, slots=True, eq=False)
class BatchRequest:
    """Batch request for the entities `raws` of a table, their ids' bytes; `started` is monotonic."""

    served: ServedGenerations
    table: Table
    raws: Sequence[bytes]
    options: RequestOptions
    started: float

    @property
    def k(self) -> int:
        """Items of each list."""
        return self.table.layout.width if self.options.k is None else self.options.k


@dataclass(slots=True, eq=False)
class ResolvedBatch:
    """Answers of a batch, one per id, as rows where they stand plainly in a record of the live generation.

    `answer_indices` int64[n]: whose answer each row is. `rows`: n records of the table's dtype that
    `serving.rendering.json_batch.plain` holds for good. `is_l2` bool[n]: the source, else L1. `answers`: those of all
    other ids, by place, as the ladder and what is left of a shortened list give them; each has its source, generation
    and marks.
    """

    answer_indices: NDArray[np.int64]
    rows: NDArray[Any]
    is_l2: NDArray[np.bool_]
    answers: dict[int, AnswerJson] = field(default_factory=dict)
