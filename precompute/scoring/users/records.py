"""Records of a chunk's users, computed or copied, in hash order."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.records.layout import NO_ITEM
from precompute.builds.build import cut_of
from precompute.builds.reuse_fact import REASONS
from precompute.config.settings import TableConfig
from precompute.scoring.encoding import Answers, encode
from precompute.scoring.tables import GrowingFile, PageFile
from precompute.scoring.users.chunk import Chunk
from precompute.scoring.users.work import ShardWork
from precompute.sources.unusable import UNFIT


def add_records(work: ShardWork, chunk: Chunk) -> Chunk:
    """Adds the records of each table to a chunk; its outputs and lists are dropped, nothing needs them after."""
    with work.busy("records"):
        for name, table in work.tables.items():
            chunk_records = own_records(work, name, table, chunk)
            chunk.records[name] = _with_copies(work, name, chunk, chunk_records)
    chunk.outputs, chunk.lists = {}, {}
    return chunk


def write(
    work: ShardWork,
    chunk: Chunk,
    files: Mapping[str, PageFile],
    directory: GrowingFile,
    reasons: GrowingFile | None,
) -> None:
    """Writes the records of a chunk and the reasons, in hash order; counts what the chunk noted."""
    for name in work.tables:
        files[name].append(chunk.records.pop(name))
    copied = chunk.copied
    directory.write_array(copied.hashes.astype("<u8", copy=False))
    work.unusable.take_in(chunk.unusable.to_json())
    work.counts["scored"] += len(copied.hashes)
    work.counts["short"] += chunk.short
    reason_numbers = copied.reasons()
    for number, name in enumerate(REASONS):
        work.counts[name] += int((reason_numbers == number).sum())
    if reasons is not None:
        reasons.write_array(reason_numbers)


def own_records(work: ShardWork, name: str, table: TableConfig, chunk: Chunk) -> NDArray[Any]:
    """Records of the chunk's own users."""
    model = str(table.value) if table.kind == "value" else "user_tower"
    answers: Answers = chunk.outputs[model]
    has_answer = chunk.answered[model]
    if table.kind == "user_topk":
        if not len(chunk.ids):
            return np.empty(0, work.layouts[name].dtype)
        answers = chunk.lists.pop(name)
        if name not in work.allowed:  # under a filter lists are short, and a gate knows how short
            possible = np.minimum(table.k, work.items.count - np.diff(chunk.seen_items.indptr))
            is_short = (answers[0] != NO_ITEM).sum(axis=1) < possible
            chunk.short += int((is_short & has_answer).sum())
    at = cut_of(work.build.generation)
    records, unfit = encode(work.layouts[name], chunk.fingerprints, answers, has_answer, at)
    if unfit.any():
        of_events = work.are_set_by_events(chunk)
        chunk.unusable.note_rows(f"records of {name}", {UNFIT: unfit}, chunk.case, of_events)
    if (
        table.kind != "user_topk"
        and work.reuse is not None
        and name in work.reuse.base_shard.tables
    ):
        rows = np.flatnonzero(chunk.copied.unchanged_positions >= 0)
        records[rows] = work.reuse.records(name, chunk.copied.unchanged_positions[rows], at)
        has_answer = has_answer | (chunk.copied.unchanged_positions >= 0)
    chunk.unusable.looked_at(f"records of {name}", int(has_answer.sum()))
    return records


def _with_copies(
    work: ShardWork, name: str, chunk: Chunk, chunk_records: NDArray[Any]
) -> NDArray[Any]:
    """Records of all users of a chunk's range."""
    copied = chunk.copied
    copied_rows = copied.copied_rows
    if work.reuse is None or not len(copied_rows):
        return chunk_records
    chunk.unusable.looked_at(f"records of {name}", len(copied_rows))
    at = cut_of(work.build.generation)
    if len(copied_rows) == len(copied.hashes):
        return work.reuse.records(name, copied.copied_positions, at)
    records = np.empty(len(copied.hashes), chunk_records.dtype)
    records[copied.rows] = chunk_records
    records[copied_rows] = work.reuse.records(name, copied.copied_positions[copied_rows], at)
    return records
