"""Partition: one pass over the sources that puts every entity's rows into the file of its hash shard."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.items import ItemTable, Ordinals
from cache.keys import hash_ids
from precompute.config import NightConfig
from precompute.erasures.erasure import NOBODY, Erased
from precompute.sources import Interactions, feature_schema, read_features, read_interactions

Hasher = Callable[[Sequence[bytes], int], NDArray[np.uint64]]

_ROWS = pa.schema([("user", pa.string()), ("ordinal", pa.int64()), ("time", pa.int64())])


def first_hash(shard: int, shards: int) -> int:
    """Where a shard's range of the 64-bit hash begins."""
    return -((-shard << 64) // shards)


def shard_of(hashes: NDArray[np.uint64], shards: int) -> NDArray[np.int64]:
    """int64[n]: the shard whose range holds each hash."""
    firsts = np.array([first_hash(shard, shards) for shard in range(shards)], np.uint64)
    return np.asarray(firsts.searchsorted(hashes, "right") - 1, np.int64)


def sort_unique(
    raws: Sequence[bytes], seed: int, hasher: Hasher = hash_ids
) -> NDArray[np.int64] | None:
    """The order that sorts distinct ids by hash, or None when two of them share one (take the next seed)."""
    hashes = hasher(raws, seed)
    order = np.argsort(hashes, kind="stable")
    placed = hashes[order]
    return None if (placed[1:] == placed[:-1]).any() else order


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What the pass saw."""

    seed: int
    users: int
    interactions: int
    unknown_items: int
    popularity: NDArray[np.int64]


def partition(
    config: NightConfig,
    items: ItemTable,
    folder: Path,
    *,
    before: datetime | None,
    seed: int = 0,
    feature_columns: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _rows: None,
    late: Callable[[Interactions], None] = lambda _late: None,
    hasher: Hasher = hash_ids,
    erased: Erased = NOBODY,
) -> Partitioned:
    """Write `<shard>.rows` (and `<shard>.features`) Arrow files into `folder`, trying seeds until no id collides.

    What is erased is in none of them, nor in what `late` is told.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        counted = _write(
            config, items, folder, before, seed, feature_columns, progress, late, hasher, erased
        )
        users = [_distinct(folder, shard, seed, hasher) for shard in range(config.shards)]
        if None not in users:
            return Partitioned(seed, sum(each or 0 for each in users), *counted)
        seed += 1


def _distinct(folder: Path, shard: int, seed: int, hasher: Hasher) -> int | None:
    found = [_read(folder / f"{shard:04d}.{kind}").column("user") for kind in ("rows", "features")]
    raws = [
        text.encode()
        for text in pc.unique(
            pa.chunked_array(found[0].chunks + found[1].chunks, pa.string())
        ).to_pylist()
    ]
    return None if sort_unique(raws, seed, hasher) is None else len(raws)


def _write(
    config: NightConfig,
    items: ItemTable,
    folder: Path,
    before: datetime | None,
    seed: int,
    feature_columns: Sequence[str],
    progress: Callable[[int], None],
    late: Callable[[Interactions], None],
    hasher: Hasher,
    erased: Erased,
) -> tuple[int, int, NDArray[np.int64]]:
    popularity = np.zeros(items.count, np.int64)
    rows = unknown = 0
    with _ShardFiles(folder, "rows", config.shards, _ROWS) as files:
        read = read_interactions(
            config.sources,
            Path(config.base),
            before=before,
            late=lambda batch: late(erased.leave_out(batch)),
        )
        for batch in map(erased.leave_out, read):
            ordinals = ordinals_of(items, batch.items)
            table = pa.table(
                {"user": batch.users, "ordinal": ordinals, "time": batch.times}, schema=_ROWS
            )
            files.write(table, _shards(batch.users, seed, config.shards, hasher))
            known = ordinals[ordinals >= 0]
            popularity += np.bincount(known, minlength=items.count)
            rows += len(ordinals)
            unknown += len(ordinals) - len(known)
            progress(rows)
    _write_features(config, folder, seed, feature_columns, hasher, erased)
    return rows, unknown, popularity


def _write_features(
    config: NightConfig,
    folder: Path,
    seed: int,
    columns: Sequence[str],
    hasher: Hasher,
    erased: Erased,
) -> None:
    schema: Any = pa.schema([("user", pa.string())])
    batches: Any = ()
    if columns:
        if not config.sources.user_features:
            raise SourceError(
                f"the model wants the user feature {columns[0]!r}, but sources.user_features is not set",
                column=columns[0],
            )
        path = config.path(config.sources.user_features)
        kinds = feature_schema(path, columns)
        schema = pa.schema(
            [("user", pa.string()), *((name, kinds.field(name).type) for name in columns)]
        )
        batches = read_features(path, config.sources.user_column, columns)
    with _ShardFiles(folder, "features", config.shards, schema) as files:
        for ids, values in batches:
            table = pa.table({"user": ids, **values}, schema=schema)
            if erased.users:
                table = table.filter(erased.keeps_users(ids))
            users = table.column("user").combine_chunks()
            files.write(table, _shards(users, seed, config.shards, hasher))


def ordinals_of(items: ItemTable, ids: Any) -> Ordinals:
    """int64[n] ordinals of an Arrow string column, -1 = unknown; each distinct id is looked up once."""
    coded = pc.dictionary_encode(ids)
    found = items.ordinals_of([text.encode() for text in coded.dictionary.to_pylist()])
    return Ordinals(found[np.asarray(coded.indices)])


def _shards(ids: Any, seed: int, shards: int, hasher: Hasher) -> NDArray[np.int64]:
    coded = pc.dictionary_encode(ids)
    hashes = hasher([text.encode() for text in coded.dictionary.to_pylist()], seed)
    return np.asarray(shard_of(hashes, shards)[np.asarray(coded.indices)])


def _read(path: Path) -> Any:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


class _ShardFiles:
    """One Arrow stream per shard, written beside and renamed when all are whole."""

    def __init__(self, folder: Path, kind: str, shards: int, schema: Any) -> None:
        self._paths = [folder / f"{shard:04d}.{kind}" for shard in range(shards)]
        # Names of its own: a task that was given up on may still be writing while its retry runs.
        token = secrets.token_hex(4)
        self._besides = [path.with_name(f".{path.name}.{token}.part") for path in self._paths]
        self._schema = schema
        self._stack = ExitStack()
        self._writers: list[Any] = []

    def __enter__(self) -> "_ShardFiles":
        for beside in self._besides:
            sink = self._stack.enter_context(pa.OSFile(str(beside), "wb"))
            self._writers.append(self._stack.enter_context(pa.ipc.new_stream(sink, self._schema)))
        return self

    def write(self, table: Any, shards: NDArray[np.int64]) -> None:
        order = np.argsort(shards, kind="stable")
        sorted_rows = table.take(pa.array(order))
        bounds = np.searchsorted(shards[order], np.arange(len(self._paths) + 1))
        for writer, start, end in zip(self._writers, bounds[:-1], bounds[1:], strict=True):
            if end > start:
                writer.write_table(sorted_rows.slice(start, end - start))

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            self._stack.close()
            if kind is None:
                for beside, path in zip(self._besides, self._paths, strict=True):
                    beside.replace(path)
        finally:
            for beside in self._besides:
                beside.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, eq=False)
class ShardInput:
    """One shard's entities in hash order; `ordinals[indptr[i]:indptr[i + 1]]` is entity i's history, oldest first."""

    ids: list[bytes]
    hashes: NDArray[np.uint64]
    indptr: NDArray[np.int64]
    ordinals: NDArray[np.int64]
    features: dict[str, Any]


def read_shard(folder: Path, shard: int, seed: int, *, history_limit: int) -> ShardInput:
    """Group a shard's rows by entity: known items only, each once (its latest place), at most `history_limit`."""
    rows = _read(folder / f"{shard:04d}.rows")
    features = _read(folder / f"{shard:04d}.features")
    ids_of_rows = rows.column("user").combine_chunks()
    ids_of_features = features.column("user").combine_chunks()
    texts = pc.unique(pa.concat_arrays([ids_of_rows, ids_of_features]))
    raws = [text.encode() for text in texts.to_pylist()]
    hashes = hash_ids(raws, seed)
    order = np.argsort(hashes, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))

    users = rank[np.asarray(pc.index_in(ids_of_rows, texts), np.int64)]
    ordinals, times = np.asarray(rows.column("ordinal")), np.asarray(rows.column("time"))
    by_time = np.lexsort((times, users))
    users, ordinals = users[by_time], ordinals[by_time]
    keep = _latest_of_each(users, ordinals) & (ordinals >= 0)
    users, ordinals = users[keep], ordinals[keep]
    ends = np.searchsorted(users, np.arange(len(raws)), "right")
    recent = ends[users] - np.arange(len(users)) <= history_limit
    users, ordinals = users[recent], ordinals[recent]

    row_of = np.asarray(pc.fill_null(pc.index_in(texts, ids_of_features), -1), np.int64)[order]
    return ShardInput(
        ids=[raws[place] for place in order.tolist()],
        hashes=hashes[order],
        indptr=np.searchsorted(users, np.arange(len(raws) + 1)),
        ordinals=ordinals,
        features={
            name: features.column(name).combine_chunks().take(pa.array(row_of, mask=row_of < 0))
            for name in features.column_names[1:]
        },
    )


def _latest_of_each(users: NDArray[np.int64], ordinals: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows are the last occurrence of their (user, item) pair."""
    place = np.arange(len(users))
    by_pair = np.lexsort((place, ordinals, users))
    u, o = users[by_pair], ordinals[by_pair]
    last = np.ones(len(users), np.bool_)
    last[:-1] = (u[1:] != u[:-1]) | (o[1:] != o[:-1])
    keep = np.zeros(len(users), np.bool_)
    keep[by_pair[last]] = True
    return keep
