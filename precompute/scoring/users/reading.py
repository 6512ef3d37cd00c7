"""Reading the users of a shard: slice by slice, into chunks of who is computed and who is copied."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.model.tower_spec import TowerSpec
from cache.process.host import usable_cores
from precompute.bulk.headroom import demand_disk
from precompute.partitions.shard_files import PARTITION, first_hash
from precompute.partitions.shard_input import ShardInput, read_shard, slice_shard, users_alone
from precompute.reuse.copied import Copied, Decisions
from precompute.reuse.digests import of_users
from precompute.scoring.inputs import computes_featured, inputs_of
from precompute.scoring.tables import GrowingFile
from precompute.scoring.users.chunk import Chunk
from precompute.scoring.users.published import given_features
from precompute.scoring.users.work import ShardWork

Read = TypeVar("Read")

CORES_OF_A_READER, READERS_MOST = 4, 4
"""Slices of a shard are read at once by at most so many, of whom each stands for so many cores of the host."""


def inputs(work: ShardWork, scratch: Path) -> Iterator[tuple[ShardInput, range, int]]:
    """Each slice of the shard with its hashes, and how many of all slices come after it.

    With a base, perhaps only of the users whose inputs have to be looked at.
    """
    config, folder = work.build.config, work.build.root / PARTITION
    if work.reuse is not None and work.reuse.touched is not None:
        folder = users_alone(folder, work.number, work.reuse.touched, scratch)
    slices = slice_shard(folder, work.number, config.shards, scratch)
    count = config.shards * len(slices.numbers)
    read = partial(
        read_shard,
        slices.folder,
        history_limit=config.history_limit,
        answers_without_history=computes_featured(work.build),
    )
    for number, found in zip(slices.numbers, _in_order(read, slices.numbers), strict=True):
        hashes = range(first_hash(number, count), first_hash(number + 1, count))
        yield found, hashes, slices.numbers.stop - number - 1


def _in_order(read: Callable[[int], Read], numbers: range) -> Iterator[Read]:
    """Slices in their order: on a host of few cores each is read when it is asked for, on others some ahead."""
    readers = min(READERS_MOST, usable_cores() // CORES_OF_A_READER)
    if readers < 2:
        yield from map(read, numbers)
        return
    with ThreadPoolExecutor(readers, "read") as pool:
        left = iter(numbers)
        asked = deque(pool.submit(read, number) for number in islice(left, readers))
        while asked:
            found = asked.popleft().result()
            asked.extend(pool.submit(read, number) for number in islice(left, 1))
            yield found
            del found  # kept by nobody here, however long it is used


def read_users(work: ShardWork, scratch: Path, pairs: GrowingFile | None = None) -> Iterator[Chunk]:
    """The shard's users for whom a model has its input; raises Refused where the disk has no room for them.

    Whoever lacks the history that a model wants is left out whole, unless the night computes featured users and a model
    answers by features alone. An unusable feature costs the tables of the models that want it. Where events are taken
    in, a user with any history is there, even without an answer. Digests of the inputs go into `pairs`.
    """
    item_hashes, before = work.items.directory.hashes(), 0
    for done, (entities, hashes, left) in enumerate(inputs(work, scratch), 1):
        digests = of_users(entities, item_hashes)
        asked = Decisions.everybody(entities, digests)
        if work.reuse is not None:
            asked = work.reuse.ask(entities, digests, hashes)
        _note_kept(work, len(asked.kept), asked.with_vector)
        if pairs is not None:
            pairs.write(asked.pairs.tobytes())
        count = len(asked.pairs)
        work.counts["entities"] = before + count
        chunks, users = chunks_of(work, asked, asked.inputs_of(entities))
        demand_disk(work.build.root, users * work.record_bytes * (left + 1))
        for chunk, share in chunks:
            chunk.entities = before + int(share * count)
            chunk.total = (before + count) * (done + left) // done
            yield chunk
        before += count


def chunks_of(
    work: ShardWork, asked: Decisions, entities: ShardInput
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
    copied = Copied.of(asked, entities.hashes, rows_of_any)
    seen, users = Histories(entities.indptr, entities.ordinals), len(copied.hashes)
    times = None if entities.times is None else Histories(entities.indptr, entities.times)

    def chunks() -> Iterator[tuple[Chunk, float]]:
        reached = 0
        for part, own in copied.parts(work.chunk_users):
            rows = rows_of_any[own]
            places = pa.array(rows)
            reached += len(part.hashes)
            own_features = {
                model: {name: column[rows] for name, column in columns.items()}
                for model, columns in features.items()
            }
            given = None
            if work.publishes_features:
                tower = work.models["user_tower"].spec
                columns_given = {
                    name: each.take(places) for name, each in entities.features.items()
                }
                given = given_features(tower, columns_given, ~entities.has_vector[rows])
            yield (
                Chunk(
                    ids=entities.ids.take(places),
                    hashes=entities.hashes[rows],
                    histories=histories.take(rows),
                    features=own_features,
                    usable={model: which[rows] for model, which in usable.items()},
                    seen=seen.take(rows),
                    vectors=None if entities.vectors is None else entities.vectors[rows],
                    copied=part,
                    times=None if times is None else times.take(rows),
                    given=given,
                    brought=entities.has_vector[rows] if "brought" in work.seen_files else None,
                ),
                reached / users,
            )

    return chunks(), users


def _note_kept(work: ShardWork, users: int, with_vector: int) -> None:
    """Counts outputs of users that are copied without being looked at: they were, for the base."""
    if users:
        for name in work.models:
            looked_at = users - (with_vector if name == "user_tower" else 0)
            work.unusable.looked_at(f"outputs of {name}", looked_at)


def _of_any(
    usable: Mapping[str, NDArray[np.bool_]], histories: Histories, specs: Mapping[str, TowerSpec]
) -> NDArray[np.bool_]:
    """bool [users]: a model can answer for the user; where one wants a history, the user has it or it does without."""
    found: NDArray[np.bool_] = np.logical_or.reduce(list(usable.values()))
    wanting = [usable[name] for name, spec in specs.items() if spec.history is not None]
    if wanting:
        found &= np.logical_or.reduce([np.diff(histories.indptr) > 0, *wanting])
    return found
