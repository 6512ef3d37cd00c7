"""A stratified sample of the users of a generation, with what the night knew of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.directory import Directory
from cache.keys import hash_ids
from cache.manifest import EntitySet
from precompute.columns import raws_of
from precompute.scoring.shard_files import HASH, NAMING, read_stream, shard_paths
from precompute.scoring.shard_input import ShardInput

SHARDS_MAX: Final = 16
"""Partition files read at most: all of a usual night, spread over the hash range of a large one."""

STRATA: Final = ("head", "tail", "new", "recent", "spread")
PER_STRATUM: Final = 80


@dataclass(frozen=True, slots=True, eq=False)
class UserSample:
    """Users with a record: longest histories (head), shortest, newest, most recently active, and any.

    `rows` names each stratum's rows of `users`; `positions` are theirs in the directory, `last` the time at which they
    last chose an item for the first time (microseconds since 1970). `with_record` counts the users of the shards that
    were read.
    """

    users: ShardInput
    positions: NDArray[np.int64]
    last: NDArray[np.int64]
    rows: Mapping[str, NDArray[np.int64]]
    in_source: int
    with_record: int


def sampled_shards(entities: EntitySet) -> list[int]:
    """The shards whose partition files gates read."""
    found = len(entities.parts)
    return sorted(
        {shard * found // min(found, SHARDS_MAX) for shard in range(min(found, SHARDS_MAX))}
    )


def read_ids(folder: Path, shard: int) -> list[bytes]:
    """Every distinct user that a shard's partition names."""
    return raws_of(_users(folder, shard).column("user"))


def seen_by(folder: Path, shard: int, users: Sequence[str]) -> set[tuple[str, int]]:
    """(user, ordinal) of all that these users chose before the cut."""
    named = _users(folder, shard)
    named = named.filter(pc.is_in(named.column("user"), value_set=pa.array(users, pa.string())))
    user_of = dict(
        zip(named.column(HASH).to_pylist(), named.column("user").to_pylist(), strict=True)
    )
    rows = read_stream(folder / f"{shard:04d}.rows")
    found = rows.filter(pc.is_in(rows.column(HASH), value_set=named.column(HASH)))
    pairs = zip(found.column(HASH).to_pylist(), found.column("ordinal").to_pylist(), strict=True)
    return {(user_of[user], ordinal) for user, ordinal in pairs}


def _users(folder: Path, shard: int) -> Any:
    """Every distinct user that a shard's partition names, with the hash."""
    named = [read_stream(path) for path in shard_paths(folder, shard, NAMING)]
    return (
        pa.concat_tables([each.select(["user", HASH]) for each in named])
        .group_by(["user", HASH], use_threads=False)
        .aggregate([])
    )


def sample_users(
    folder: Path, entities: EntitySet, directory: Directory, *, history_limit: int
) -> UserSample:
    """Read the partition's files and choose; the same files give the same sample."""
    shards = sampled_shards(entities)
    per_shard = -(-PER_STRATUM // len(shards))
    parts = [_shard(folder, shard, directory, per_shard, history_limit) for shard in shards]
    starts = np.cumsum([0, *(len(part.positions) for part in parts)])
    users = _joined([part.users for part in parts])
    return UserSample(
        users,
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.last for part in parts]),
        {
            name: np.concatenate(
                [part.rows[name] + start for part, start in zip(parts, starts, strict=False)]
            )
            for name in STRATA
        },
        sum(part.in_source for part in parts),
        sum(part.with_record for part in parts),
    )


def _shard(
    folder: Path, shard: int, directory: Directory, per_stratum: int, history_limit: int
) -> UserSample:
    rows, features = (read_stream(folder / f"{shard:04d}.{kind}") for kind in ("rows", "features"))
    users = _users(folder, shard).combine_chunks()
    grouped = rows.group_by(HASH).aggregate([("time", "min"), ("time", "max"), ("time", "count")])
    place = pc.index_in(users.column(HASH), grouped.column(HASH)).combine_chunks()
    counts, first, last = (
        np.asarray(pc.fill_null(grouped.column(f"time_{what}").combine_chunks().take(place), 0))
        for what in ("count", "min", "max")
    )
    raws = raws_of(users.column("user"))
    hashes = hash_ids(raws, directory.seed)
    positions = directory.find_many(hashes)
    known = np.flatnonzero(positions >= 0)
    known = known[np.argsort(positions[known], kind="stable")]
    orders = {
        "head": np.argsort(-counts[known], kind="stable"),
        "tail": np.argsort(counts[known], kind="stable"),
        "new": np.argsort(-first[known], kind="stable"),
        "recent": np.argsort(-last[known], kind="stable"),
        "spread": np.unique(np.linspace(0, max(0, len(known) - 1), per_stratum).astype(np.int64)),
    }
    chosen = {name: known[order[:per_stratum]] for name, order in orders.items()}
    picked = np.unique(np.concatenate(list(chosen.values())))
    users, chose = _inputs(rows, features, users, picked, hashes, history_limit)
    strata = {name: np.searchsorted(picked, np.sort(each)) for name, each in chosen.items()}
    return UserSample(users, positions[picked], chose, strata, len(raws), len(known))


def _inputs(
    rows: Any,
    features: Any,
    users: Any,
    picked: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    history_limit: int,
) -> tuple[ShardInput, NDArray[np.int64]]:
    """What `read_shard` says of these users, found another way: row by row, the later occurrence wins.

    And when each of them last chose an item that was new to them: a repeat changes no list.
    """
    users = users.take(pa.array(picked)).combine_chunks()
    wanted = users.column(HASH).combine_chunks()
    found = rows.filter(pc.is_in(rows.column(HASH), value_set=wanted))
    whose = np.asarray(pc.index_in(found.column(HASH), wanted))
    ordinals = np.asarray(found.column("ordinal"))
    times = np.asarray(found.column("time"))
    order = np.argsort(times, kind="stable")
    chose = np.zeros(len(picked), np.int64)
    seen: list[dict[int, None]] = [{} for _ in range(len(picked))]
    for user, ordinal, time in zip(
        whose[order].tolist(), ordinals[order].tolist(), times[order].tolist(), strict=True
    ):
        if ordinal < 0:
            continue
        if ordinal in seen[user]:
            del seen[user][ordinal]
        else:
            chose[user] = time
        seen[user][ordinal] = None
    kept = [list(each)[-history_limit:] for each in seen]
    at = pc.index_in(wanted, features.column(HASH))
    inputs = ShardInput(
        ids=raws_of(users.column("user")),
        hashes=hashes[picked],
        indptr=np.cumsum([0, *(len(each) for each in kept)]),
        ordinals=np.array([ordinal for each in kept for ordinal in each], np.int64),
        features={
            name: features.column(name).combine_chunks().take(at)
            for name in features.column_names[2:]
        },
    )
    return inputs, chose


def _joined(parts: list[ShardInput]) -> ShardInput:
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    return ShardInput(
        ids=[raw for part in parts for raw in part.ids],
        hashes=np.concatenate([part.hashes for part in parts]),
        indptr=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        ordinals=np.concatenate([part.ordinals for part in parts]),
        features={
            name: pa.concat_arrays([part.features[name] for part in parts])
            for name in parts[0].features
        },
    )
