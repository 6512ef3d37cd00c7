"""Reading of the users of a shard: slice by slice, into chunks of users that are computed or copied."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.model.tower_spec import TowerSpec
from cache.process.host import usable_cores
from precompute.bulk.headroom import demand_disk_room
from precompute.partitions.digests import Digests, of_users
from precompute.partitions.shard_files import PARTITION, first_hash
from precompute.partitions.shard_input import (
    ShardInput,
    ShardPieces,
    group_rows,
    joined,
    read_tables,
    slice_shard,
    users_alone,
)
from precompute.scoring.copies import CopiedUsers, CopyDecisions, PublishedInputs
from precompute.scoring.pages import GrowingFile
from precompute.scoring.shard_work import Chunk, ShardWork
from precompute.scoring.towers import computes_featured, inputs_of
from precompute.sources.features import read_values

Read = TypeVar("Read")

CORES_OF_A_READER, READERS_MOST = 3, 5
"""Cores of the host per reading thread of a shard, and the most such threads."""

PIECES_AHEAD = 3
"""Pieces of a shard under way, or waiting, for each reader; of slices, which are larger, there is one."""


def read_users(work: ShardWork, scratch: Path, pairs: GrowingFile | None = None) -> Iterator[Chunk]:
    """Yield the shard's users for whom a model has its input; raise Refused if the disk has no room for them.

    A user without the history that a model needs is left out, unless the night computes featured users and a model
    answers by features alone. An unusable feature costs the tables of the models that need it. If events are taken
    in, a user with any history is included, even without an answer. Digests of the inputs go into `pairs`.
    """
    prior_count = 0
    for slice_number, (entities, digests, hashes, slices_left) in enumerate(
        slices_of(work, scratch), 1
    ):
        decisions = CopyDecisions.without_copies(entities, digests)
        if work.copies is not None:
            decisions = work.copies.decide(entities, digests, hashes)
        _note_kept(work, len(decisions.copied_positions), decisions.with_vector)
        if pairs is not None:
            pairs.write_array(decisions.pairs)
        count = len(decisions.pairs)
        work.counts["entities"] = prior_count + count
        chunks, users = chunks_of(work, decisions, decisions.inputs_of(entities))
        demand_disk_room(work.build.root, users * work.record_bytes * (slices_left + 1))
        for chunk, reached_share in chunks:
            chunk.entities = prior_count + int(reached_share * count)
            chunk.total = (prior_count + count) * (slice_number + slices_left) // slice_number
            yield chunk
        prior_count += count


def timed_reads(work: ShardWork, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of `read_users`; the time that each takes to come is that of reading."""
    while True:
        with work.busy("read"):
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk
        del chunk  # kept by nobody here, however long it is used


def chunks_of(
    work: ShardWork, decisions: CopyDecisions, entities: ShardInput
) -> tuple[Iterator[tuple[Chunk, float]], int]:
    """(chunks of those with an input, and of those that are kept, each with how far it reaches; users in all)."""
    specs = {name: model.spec for name, model in work.models.items()}
    usable, histories, features = inputs_of(work.items, entities, specs)
    # Whoever brings a vector along needs no tower for it.
    usable["user_tower"] &= ~entities.has_vector
    is_any = _of_any(usable, histories, specs) | entities.has_vector
    if work.build.config.events.enabled:  # events are added to what such a user had, too
        is_any |= np.diff(entities.indptr) > 0
    rows_of_any = np.flatnonzero(is_any)
    copied = CopiedUsers.of(decisions, entities.hashes, rows_of_any)
    seen_items, users = Histories(entities.indptr, entities.ordinals), len(copied.hashes)
    times = None if entities.times is None else Histories(entities.indptr, entities.times)

    def chunks() -> Iterator[tuple[Chunk, float]]:
        reached = 0
        for part, own_slice in copied.parts(work.chunk_users):
            rows = rows_of_any[own_slice]
            arrow_rows = pa.array(rows)
            reached += len(part.hashes)
            own_features = {
                model: {name: column[rows] for name, column in columns.items()}
                for model, columns in features.items()
            }
            feature_json = None
            if work.publishes_features:
                tower = work.models["user_tower"].spec
                columns_given = {
                    name: column.take(arrow_rows) for name, column in entities.features.items()
                }
                feature_json = feature_json_rows(tower, columns_given, ~entities.has_vector[rows])
            yield (
                Chunk(
                    ids=entities.ids.take(arrow_rows),
                    hashes=entities.hashes[rows],
                    histories=histories.select_rows(rows),
                    features=own_features,
                    usable={model: mask[rows] for model, mask in usable.items()},
                    inputs=PublishedInputs(
                        seen_items.select_rows(rows),
                        None if times is None else times.select_rows(rows),
                        feature_json,
                        entities.has_vector[rows] if "brought" in work.seen_files else None,
                    ),
                    vectors=None if entities.vectors is None else entities.vectors[rows],
                    copied=part,
                ),
                reached / users,
            )

    return chunks(), users


def _of_any(
    usable: Mapping[str, NDArray[np.bool_]], histories: Histories, specs: Mapping[str, TowerSpec]
) -> NDArray[np.bool_]:
    """bool [users]: a model can answer for the user; where one wants a history, the user has it or it does without."""
    is_answerable: NDArray[np.bool_] = np.logical_or.reduce(list(usable.values()))
    wanting = [usable[name] for name, spec in specs.items() if spec.history is not None]
    if wanting:
        is_answerable &= np.logical_or.reduce([np.diff(histories.indptr) > 0, *wanting])
    return is_answerable


def _note_kept(work: ShardWork, users: int, with_vector: int) -> None:
    """Count outputs of users that are copied unread: they were checked when they were computed."""
    if users:
        for name in work.models:
            looked_at = users - (with_vector if name == "user_tower" else 0)
            work.unusable.looked_at(f"outputs of {name}", looked_at)


class Slice(NamedTuple):
    """Users of one slice of a shard with their digests, the hashes that it spans, and how many slices come after it."""

    entities: ShardInput
    digests: Digests
    hashes: range
    remaining_slices: int


def slices_of(work: ShardWork, scratch: Path) -> Iterator[Slice]:
    """Yield each slice of the shard, in hash order; with copies perhaps only users whose inputs have to be read."""
    config, folder = work.build.config, work.build.root / PARTITION
    if work.copies is not None and work.copies.touched is not None:
        folder = users_alone(folder, work.number, work.copies.touched, scratch)
    pieces = ShardPieces.open(folder, work.number, config.shards)
    if pieces is None:
        slices = slice_shard(folder, work.number, config.shards, scratch)
        folder, numbers, count = slices.folder, slices.numbers, len(slices.numbers)
    else:
        numbers, count = pieces.numbers, pieces.slices
    limit, featured = config.history_limit, computes_featured(work.build)
    item_hashes = work.items.directory.hashes()

    def read(number: int) -> tuple[ShardInput, Digests]:
        tables = read_tables(folder, number) if pieces is None else pieces.tables(number)
        entities = group_rows(tables, history_limit=limit, answers_without_history=featured)
        return entities, of_users(entities, item_hashes)

    total = config.shards * len(numbers)
    ahead = 1 if pieces is None else PIECES_AHEAD
    with closing(_in_order(read, numbers, ahead)) as read_parts:
        for slice_index in range(count):
            start, end = (
                numbers.start + len(numbers) * at // count for at in (slice_index, slice_index + 1)
            )
            parts = list(islice(read_parts, end - start))
            entities = joined([part for part, _ in parts])
            digests = np.concatenate([digests for _, digests in parts])
            del parts
            if pieces is not None:
                pieces.let_go()
            hashes = range(first_hash(start, total), first_hash(end, total))
            yield Slice(entities, digests, hashes, count - slice_index - 1)
            del entities, digests  # kept by nobody here, however long they are used


def _in_order(read: Callable[[int], Read], numbers: range, ahead: int = 1) -> Generator[Read]:
    """Yield values of a shard's parts in their order: on a host of few cores each is read on demand.

    On others there are several readers, and as many parts for each under way, or waiting, as it may be `ahead`.
    """
    readers = min(READERS_MOST, usable_cores() // CORES_OF_A_READER)
    if readers < 2:
        yield from map(read, numbers)
        return
    with ThreadPoolExecutor(readers, "read") as pool:
        remaining_numbers = iter(numbers)
        futures = deque(
            pool.submit(read, number) for number in islice(remaining_numbers, readers * ahead)
        )
        try:
            while futures:
                read_part = futures.popleft().result()
                futures.extend(pool.submit(read, number) for number in islice(remaining_numbers, 1))
                yield read_part
                del read_part  # kept by nobody here, however long it is used
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def feature_json_rows(
    spec: TowerSpec, features: Mapping[str, Any], published: NDArray[np.bool_]
) -> Histories:
    """Convert columns of features to rows of JSON by column, as callers send them; omit unusable values.

    The row is empty for a user who is not `published`, or has no such value.
    """
    row_features: list[dict[str, Any]] = [{} for _ in published]
    # Two inputs may read one column: a whole number is what both take.
    for feature in sorted(spec.features, key=lambda feature: feature.dtype != "float32"):
        name = str(feature.column)
        values = read_values(features[name], feature)
        numbers = values.numbers.tolist()
        for row in np.flatnonzero(values.usable & published).tolist():
            row_features[row][name] = numbers[row]
    rows = [orjson.dumps(row) if row else b"" for row in row_features]
    ends = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    bytes_: Any = np.frombuffer(b"".join(rows), np.uint8)
    return Histories(ends, bytes_)
