"""The live generation's lists of sampled users, read from Redis as readers read them."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, NotJudged
from cache.format.manifest import Table
from precompute.gates.evidence.candidate import Candidate

AT_ONCE: Final = 200


@dataclass(frozen=True, slots=True, eq=False)
class LiveLists:
    """Records of the live generation; `ids` int64[live items] gives its ordinals as this generation's.

    An item that this generation lacks has a negative number of its own, so it equals nothing.
    """

    records: NDArray[Any]
    ids: NDArray[np.int64]


def matching_table(candidate: Candidate, table: Table) -> Table | None:
    """The live generation's table of the same name and kind, None when it has none."""
    live_table = None if candidate.live is None else candidate.live.tables.get(table.name)
    return (
        live_table
        if live_table is not None
        and (live_table.kind, live_table.entity) == (table.kind, table.entity)
        else None
    )


def read_live(candidate: Candidate, table: Table, positions: NDArray[np.int64]) -> LiveLists:
    """Records of live users at these positions; raises NotJudged when Redis lacks one of them."""
    directory = candidate.evidence.live_users
    if candidate.live is None or directory is None:
        raise CorruptArtefact("there is no live generation")
    client, size = candidate.control.client, table.layout.size_bytes
    raw: list[bytes] = []
    for start in range(0, len(positions), AT_ONCE):
        pipeline = client.pipeline(transaction=False)
        for position in positions[start : start + AT_ONCE].tolist():
            page, offset = table.locate(*directory.locate(position))
            name = candidate.control.keys.page(candidate.live.generation, table.name, page)
            pipeline.getrange(name, offset, offset + size - 1)
        raw += pipeline.execute()
    if any(len(record) != size for record in raw):
        raise NotJudged(
            f"Redis lacks records of {table.name} of the live generation, so nothing can be compared with it: run "
            "`larder restore`, then verify again"
        )
    return LiveLists(
        np.frombuffer(b"".join(raw), table.layout.dtype), candidate.evidence.live_ordinals
    )
