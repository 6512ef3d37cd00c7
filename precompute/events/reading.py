"""Reading of files of events as interactions, behind those of the team."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.sources.columns import Ids
from precompute.sources.files import SourceFile, readable
from precompute.sources.formats import BATCH_ROWS, INTERACTIONS
from precompute.sources.readers import Interactions, reading
from precompute.sources.unusable import EVENTS, UnusableRows

EVENT_ROWS: Final = f"{EVENTS}.{INTERACTIONS}"
"""Name of the interactions that events brought in reports."""
_COLUMNS: Final = ["user", "item", "time", "weight", "position"]


def read_events(files: Sequence[SourceFile], unusable: UnusableRows) -> Iterator[Interactions]:
    """Batches of the interactions of positive weight; no cut is asked for, since their position decided.

    Their ids were checked when they were accepted. They count as rows of events, so that they hide no share of bad rows
    of the sources. Raises SourceError naming a file that cannot be read.
    """
    for path in files:
        with reading(path), readable(path) as raw, pq.ParquetFile(raw) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=_COLUMNS):
                unusable.looked_at(EVENT_ROWS, len(batch))
                yield _interactions(batch)


def _interactions(batch: Any) -> Interactions:
    has_both = pc.and_(batch.column("user").is_valid(), batch.column("item").is_valid())
    rows = batch.filter(pc.and_(has_both, pc.greater(batch.column("weight"), 0.0)))
    return Interactions(
        Ids.of(rows.column("user")),
        Ids.of(rows.column("item")),
        np.asarray(rows.column("time").cast(pa.int64())),
        np.asarray(rows.column("position")),
    )
