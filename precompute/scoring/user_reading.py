"""Reading of a shard's users: slice by slice, into chunks of users that are computed or copied."""

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
from precompute.partitions.digests import Digests, digest_users
from precompute.partitions.shard_files import PARTITION_FOLDER, first_hash
from precompute.partitions.shard_input import (
    ShardInput,
    ShardPieces,
    group_rows_by_entity,
    join_shard_inputs,
    read_tables_by_kind,
    slice_shard,
    write_selected_users,
)
from precompute.scoring.copies import CopiedUsers, CopyDecisions, PublishedInputs
from precompute.scoring.pages import GrowingFile
from precompute.scoring.shard_work import Chunk, ShardWork
from precompute.scoring.towers import computes_feature_only_users, prepare_inputs
from precompute.sources.features import read_feature_values

ReadPart = TypeVar("ReadPart")

CORES_PER_READER, READERS_MAX = 3, 5
"""Cores of the host per reading thread of a shard, and the most such threads."""

PIECES_PER_READER = 3
"""Pieces of a shard in progress or waiting per reader; of slices, which are larger, there is one per reader."""


def read_users(work: ShardWork, scratch: Path, digests_file: GrowingFile | None = None) -> Iterator[Chunk]:
    """Yield chunks of the shard's users for whom a model has inputs; raise Refused if the disk has no room for them.

    A user without the history that a model needs is left out, unless the night computes users with features alone and a
    model answers for them. An unusable feature only affects the tables of the models that take it. If events are read,
    a user with any history is included, even without an answer. Digests of the inputs go into `digests_file`.
    """
    earlier_user_count = 0
    for slice_number, (entities, digests, hashes, remaining_slices) in enumerate(read_slices(work, scratch), 1):
        decisions = CopyDecisions.without_copies(entities, digests)
        if work.user_copies is not None:
            decisions = work.user_copies.decide(entities, digests, hashes)
        _count_copied(work, len(decisions.copied_positions), decisions.copied_vector_count)
        if digests_file is not None:
            digests_file.write_array(decisions.digest_pairs)
        slice_user_count = len(decisions.digest_pairs)
        work.count_by_name["entities"] = earlier_user_count + slice_user_count
        chunks, user_count = split_into_chunks(work, decisions, decisions.inputs_of(entities))
        demand_disk_room(work.build.root, user_count * work.record_bytes * (remaining_slices + 1))
        for chunk, reached_share in chunks:
            chunk.entities_so_far = earlier_user_count + int(reached_share * slice_user_count)
            chunk.shard_entity_count = (
                (earlier_user_count + slice_user_count) * (slice_number + remaining_slices) // slice_number
            )
            yield chunk
        earlier_user_count += slice_user_count


def time_reads(work: ShardWork, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of `read_users`, and count the time until each arrives as reading."""
    while True:
        with work.add_stage_time("read"):
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk
        del chunk  # no reference remains here, so the chunk can be freed


def split_into_chunks(
    work: ShardWork, decisions: CopyDecisions, entities: ShardInput
) -> tuple[Iterator[tuple[Chunk, float]], int]:
    """Return (chunks of users with an input or copied, each with the share of users read so far; number of users)."""
    specs = {model_name: model.spec for model_name, model in work.models.items()}
    is_usable_by_model, histories, features = prepare_inputs(work.items, entities, specs)
    # Users with a vector from the sources need no tower output.
    is_usable_by_model["user_tower"] &= ~entities.has_vector
    is_answerable = _is_answerable_by_any(is_usable_by_model, histories, specs) | entities.has_vector
    if work.build.config.events.enabled:  # the service adds events to these users' histories
        is_answerable |= np.diff(entities.history_indptr) > 0
    answerable_rows = np.flatnonzero(is_answerable)
    copied = CopiedUsers.of(decisions, entities.entity_hashes, answerable_rows)
    seen_items, user_count = Histories(entities.history_indptr, entities.history_ordinals), len(copied.user_hashes)
    times = None if entities.history_times is None else Histories(entities.history_indptr, entities.history_times)

    def chunks() -> Iterator[tuple[Chunk, float]]:
        reached_count = 0
        for part, own_slice in copied.split(work.chunk_users):
            rows = answerable_rows[own_slice]
            arrow_rows = pa.array(rows)
            reached_count += len(part.user_hashes)
            own_features = {
                model: {model_name: column[rows] for model_name, column in columns.items()}
                for model, columns in features.items()
            }
            feature_json = None
            if work.publishes_features:
                tower = work.models["user_tower"].spec
                columns_by_name = {
                    model_name: column.take(arrow_rows) for model_name, column in entities.features.items()
                }
                feature_json = feature_json_rows(tower, columns_by_name, ~entities.has_vector[rows])
            yield (
                Chunk(
                    user_ids=entities.entity_ids.take(arrow_rows),
                    user_hashes=entities.entity_hashes[rows],
                    histories=histories.select_rows(rows),
                    features_by_model=own_features,
                    is_usable_by_model={model: mask[rows] for model, mask in is_usable_by_model.items()},
                    published_inputs=PublishedInputs(
                        seen_items.select_rows(rows),
                        None if times is None else times.select_rows(rows),
                        feature_json,
                        entities.has_vector[rows] if "brought" in work.seen_files else None,
                    ),
                    user_vectors=None if entities.entity_vectors is None else entities.entity_vectors[rows],
                    copied_users=part,
                ),
                reached_count / user_count,
            )

    return chunks(), user_count


def _is_answerable_by_any(
    is_usable_by_model: Mapping[str, NDArray[np.bool_]], histories: Histories, specs: Mapping[str, TowerSpec]
) -> NDArray[np.bool_]:
    """Return bool [users]: some model can answer for the user.

    If models take a history, the user must have one, or a model that takes histories must do without.
    """
    is_answerable: NDArray[np.bool_] = np.logical_or.reduce(list(is_usable_by_model.values()))
    usable_with_history = [
        is_usable_by_model[model_name] for model_name, spec in specs.items() if spec.history is not None
    ]
    if usable_with_history:
        is_answerable &= np.logical_or.reduce([np.diff(histories.indptr) > 0, *usable_with_history])
    return is_answerable


def _count_copied(work: ShardWork, user_count: int, vector_count: int) -> None:
    """Count the outputs of users who are copied without a check: they were checked when they were computed."""
    if user_count:
        for model_name in work.models:
            output_count = user_count - (vector_count if model_name == "user_tower" else 0)
            work.unusable.count_checked(f"outputs of {model_name}", output_count)


class Slice(NamedTuple):
    """Users of one slice of a shard, their digests, the range of hashes, and the number of slices after it."""

    entities: ShardInput
    digests: Digests
    hash_range: range
    remaining_slices: int


def read_slices(work: ShardWork, scratch: Path) -> Iterator[Slice]:
    """Yield the slices of the shard in hash order; with copies, maybe only users whose inputs must be read."""
    config, folder = work.build.config, work.build.root / PARTITION_FOLDER
    if work.user_copies is not None and work.user_copies.touched_user_hashes is not None:
        folder = write_selected_users(folder, work.shard, work.user_copies.touched_user_hashes, scratch)
    pieces = ShardPieces.open(folder, work.shard, config.shards)
    if pieces is None:
        slices = slice_shard(folder, work.shard, config.shards, scratch)
        folder, numbers, slice_count = slices.folder, slices.slice_numbers, len(slices.slice_numbers)
    else:
        numbers, slice_count = pieces.range_numbers, pieces.slice_count
    history_limit, computes_alone = config.history_limit, computes_feature_only_users(work.build)
    item_hashes = work.items.directory.hashes()

    def read_slice(slice_number: int) -> tuple[ShardInput, Digests]:
        tables = read_tables_by_kind(folder, slice_number) if pieces is None else pieces.tables(slice_number)
        entities = group_rows_by_entity(tables, history_limit=history_limit, answers_without_history=computes_alone)
        return entities, digest_users(entities, item_hashes)

    part_count = config.shards * len(numbers)
    parts_per_reader = 1 if pieces is None else PIECES_PER_READER
    with closing(_read_in_order(read_slice, numbers, parts_per_reader)) as parts_in_order:
        for slice_index in range(slice_count):
            first_part, end_part = (
                numbers.start + len(numbers) * slice_bound // slice_count
                for slice_bound in (slice_index, slice_index + 1)
            )
            parts = list(islice(parts_in_order, end_part - first_part))
            entities = join_shard_inputs([part for part, _ in parts])
            digests = np.concatenate([digests for _, digests in parts])
            del parts
            if pieces is not None:
                pieces.let_go()
            hashes = range(first_hash(first_part, part_count), first_hash(end_part, part_count))
            yield Slice(entities, digests, hashes, slice_count - slice_index - 1)
            del entities, digests  # no references remain here, so the memory can be freed


def _read_in_order(
    read_one_part: Callable[[int], ReadPart], part_numbers: range, parts_per_reader: int = 1
) -> Generator[ReadPart]:
    """Yield `read_one_part` of each part, in order; on a host with few cores, each is read on demand.

    On other hosts there are several readers, and up to `parts_per_reader` parts per reader in progress or waiting.
    """
    reader_count = min(READERS_MAX, usable_cores() // CORES_PER_READER)
    if reader_count < 2:
        yield from map(read_one_part, part_numbers)
        return
    with ThreadPoolExecutor(reader_count, "read") as pool:
        unread_numbers = iter(part_numbers)
        futures = deque(
            pool.submit(read_one_part, part_number)
            for part_number in islice(unread_numbers, reader_count * parts_per_reader)
        )
        try:
            while futures:
                read_part = futures.popleft().result()
                futures.extend(pool.submit(read_one_part, part_number) for part_number in islice(unread_numbers, 1))
                yield read_part
                del read_part  # no reference remains here, so the part can be freed
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def feature_json_rows(spec: TowerSpec, features: Mapping[str, Any], is_published: NDArray[np.bool_]) -> Histories:
    """Convert feature columns to one JSON object per row, as callers send features; omit unusable values.

    The row is empty for a user who is not `is_published`, or who has no usable value.
    """
    features_of_rows: list[dict[str, Any]] = [{} for _ in is_published]
    # Two inputs may read one column; the integer input comes last, since whole numbers fit both.
    for feature in sorted(spec.features, key=lambda feature: feature.dtype != "float32"):
        column_name = str(feature.column)
        values = read_feature_values(features[column_name], feature)
        column_values = values.input_numbers.tolist()
        for row in np.flatnonzero(values.usable_mask & is_published).tolist():
            features_of_rows[row][column_name] = column_values[row]
    json_rows = [orjson.dumps(row) if row else b"" for row in features_of_rows]
    json_ends = np.cumsum([0, *map(len, json_rows)], dtype=np.int64)
    json_bytes: Any = np.frombuffer(b"".join(json_rows), np.uint8)
    return Histories(json_ends, json_bytes)
