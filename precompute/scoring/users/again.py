"""Records computed once more, as if there were no base: what a gate holds copies against."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from precompute.partitions.shard_files import PARTITION
from precompute.partitions.shard_input import read_shard, users_alone
from precompute.reuse.copied import CopyDecisions
from precompute.reuse.digests import of_users
from precompute.scoring.inputs import computes_featured
from precompute.scoring.users.reading import chunks_of
from precompute.scoring.users.records import own_records
from precompute.scoring.users.work import ShardWork


def recompute_users(
    work: ShardWork, hashes: NDArray[np.uint64], scratch: Path
) -> dict[int, dict[str, bytes]]:
    """Records of the users with these sorted hashes by hash and table, computed as if there were no base."""
    folder = users_alone(work.build.root / PARTITION, work.number, hashes, scratch)
    limit, records_by_hash = work.build.config.history_limit, dict[int, dict[str, bytes]]()
    entities = read_shard(
        folder,
        work.number,
        history_limit=limit,
        answers_without_history=computes_featured(work.build),
    )
    digests = of_users(entities, work.items.directory.hashes())
    for chunk, _ in chunks_of(work, CopyDecisions.without_copies(entities, digests), entities)[0]:
        chunk = work.score(work.encode(chunk))
        tables = {
            name: own_records(work, name, table, chunk) for name, table in work.tables.items()
        }
        for row, user_hash in enumerate(chunk.hashes.tolist()):
            records_by_hash[user_hash] = {
                name: records[row].tobytes() for name, records in tables.items()
            }
    return records_by_hash
