"""Users of one shard scored: reading, encoding, comparing and writing overlap; files are in hash order."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.records import NO_ITEM
from precompute.builds.build import Build, data_until_of
from precompute.builds.reports import UserScores, file_entry
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress
from precompute.config.settings import TableConfig
from precompute.partitions.catalogue import directory_file_path
from precompute.partitions.digests import digest_users
from precompute.partitions.shard_files import PARTITION_FOLDER
from precompute.partitions.shard_input import read_shard, scratch_folder, write_selected_users
from precompute.partitions.stages import StreamStages
from precompute.scoring.copies import REASONS, CopyDecisions, inputs_file, reasons_file
from precompute.scoring.pages import Answers, GrowingFile, PageFile, describe_pages, encode_records
from precompute.scoring.scorers import Scorers
from precompute.scoring.shard_work import Chunk, ShardWork
from precompute.scoring.towers import computes_featured
from precompute.scoring.user_reading import chunks_of, read_users, timed_reads
from precompute.sources.unusable import PRECISION_REASON


def score_users(
    build: Build,
    bundle: Bundle,
    shard: int,
    scorers: Scorers,
    progress: Progress,
) -> UserScores:
    """All user tables of one shard; returns the shard's report. Memory does not depend on the number of users."""
    started = time.perf_counter()
    work = ShardWork.of(build, bundle, shard, scorers)
    directory_path, inputs = directory_file_path("user", shard), inputs_file(shard)
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(build.root / PARTITION_FOLDER))
        files = {
            name: stack.enter_context(
                PageFile(build.path(work.pages(name)), layout, build.config.page_bytes)
            )
            for name, layout in work.layouts.items()
        }
        directory = stack.enter_context(GrowingFile(build.path(directory_path)))
        pairs = stack.enter_context(GrowingFile(build.path(inputs)))
        seen_file_by_part = {
            name: stack.enter_context(GrowingFile(build.path(path)))
            for name, path in work.seen_files.items()
        }
        reasons = None
        if work.copies is not None:
            reasons = stack.enter_context(GrowingFile(build.path(reasons_file(shard))))
        stages = stack.enter_context(
            StreamStages()
        )  # last, so stopped before anything they use is gone
        read = stages.run_ahead(timed_reads(work, read_users(work, scratch, pairs)))
        encoded = stages.map_values(work.encode, work.opened(read), workers=work.workers)
        scored = stages.run_ahead(work.scored(encoded))
        for chunk in stages.map_values(partial(add_records, work), scored, workers=work.workers):
            with work.busy("write"):
                write_records(work, chunk, files, directory, reasons)
                if seen_file_by_part:
                    write_inputs(work, chunk, seen_file_by_part)
            progress(f"score shard {shard}", chunk.entities, chunk.total)
    count = work.counts["scored"]
    return {
        "entities": work.counts["entities"],
        "scored": count,
        "without_input": work.counts["entities"] - count,
        "short": work.counts["short"],
        "unusable": work.unusable.to_json(),
        "seconds": {**work.seconds, "all": time.perf_counter() - started},
        "reasons": None if work.copies is None else {name: work.counts[name] for name in REASONS},
        "directory": file_entry(build.describe(directory_path)),
        "inputs": file_entry(build.describe(inputs)),
        "seen": [file_entry(build.describe(path)) for path in work.seen_files.values()],
        "tables": {name: describe_pages(build, file) for name, file in files.items()},
    }


def add_records(work: ShardWork, chunk: Chunk) -> Chunk:
    """Adds the records of each table to a chunk; its outputs and lists are dropped, nothing needs them after."""
    with work.busy("records"):
        for name, table in work.tables.items():
            chunk_records = own_records(work, name, table, chunk)
            chunk.records[name] = _with_copies(work, name, chunk, chunk_records)
    chunk.outputs, chunk.lists = {}, {}
    return chunk


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
    at = data_until_of(work.build.generation)
    records, unfit = encode_records(work.layouts[name], chunk.fingerprints, answers, has_answer, at)
    if unfit.any():
        of_events = work.are_set_by_events(chunk)
        chunk.unusable.note_rows(
            f"records of {name}", {PRECISION_REASON: unfit}, chunk.case, of_events
        )
    if table.kind != "user_topk" and work.copies is not None and name in work.copies.tables:
        rows = np.flatnonzero(chunk.copied.unchanged_positions >= 0)
        records[rows] = work.copies.records(name, chunk.copied.unchanged_positions[rows], at)
        has_answer = has_answer | (chunk.copied.unchanged_positions >= 0)
    chunk.unusable.count_checked(f"records of {name}", int(has_answer.sum()))
    return records


def _with_copies(
    work: ShardWork, name: str, chunk: Chunk, chunk_records: NDArray[Any]
) -> NDArray[Any]:
    """Records of all users of a chunk's range."""
    copied = chunk.copied
    copied_rows = copied.copied_rows
    if work.copies is None or not len(copied_rows):
        return chunk_records
    chunk.unusable.count_checked(f"records of {name}", len(copied_rows))
    at = data_until_of(work.build.generation)
    if len(copied_rows) == len(copied.hashes):
        return work.copies.records(name, copied.copied_positions, at)
    records = np.empty(len(copied.hashes), chunk_records.dtype)
    records[copied.rows] = chunk_records
    records[copied_rows] = work.copies.records(name, copied.copied_positions[copied_rows], at)
    return records


def write_records(
    work: ShardWork,
    chunk: Chunk,
    files: Mapping[str, PageFile],
    directory: GrowingFile,
    reasons: GrowingFile | None,
) -> None:
    """Write the records and reasons of a chunk, in hash order; add the chunk's counts."""
    for name in work.tables:
        files[name].append(chunk.records.pop(name))
    copied = chunk.copied
    directory.write_array(copied.hashes.astype("<u8", copy=False))
    work.unusable.add_report(chunk.unusable.to_json())
    work.counts["scored"] += len(copied.hashes)
    work.counts["short"] += chunk.short
    reason_numbers = copied.reasons()
    for number, name in enumerate(REASONS):
        work.counts[name] += int((reason_numbers == number).sum())
    if reasons is not None:
        reasons.write_array(reason_numbers)


def write_inputs(work: ShardWork, chunk: Chunk, files: Mapping[str, GrowingFile]) -> None:
    """Writes the inputs of the users of a chunk's range, in hash order, copied ones among them."""
    copied, inputs = chunk.copied, chunk.inputs
    copied_rows = copied.copied_rows
    if work.copies is not None and len(copied_rows):
        inputs = copied.merge_inputs(
            inputs, work.copies.read_inputs(copied.copied_positions[copied_rows])
        )
    _write_ends(work, "seen", inputs.seen_items, files["ends"])
    files["items"].write_array(inputs.seen_items.indices.astype("<u4"))
    if inputs.times is not None:
        files["times"].write_array(inputs.times.indices.astype("<i8"))
    if inputs.feature_json is not None:
        _write_ends(work, "given", inputs.feature_json, files["feature_ends"])
        files["features"].write_array(inputs.feature_json.indices.astype("u1"))
    if inputs.has_own_vector is not None:
        files["brought"].write_array(inputs.has_own_vector.astype("u1"))


def _write_ends(work: ShardWork, count: str, rows: Histories, ends: GrowingFile) -> None:
    """Write the position where each row ends, counted over all chunks."""
    ends.write_array((work.counts[count] + rows.indptr[1:]).astype("<u8"))
    work.counts[count] += int(rows.indptr[-1])


def recompute_users(
    work: ShardWork, hashes: NDArray[np.uint64], scratch: Path
) -> dict[int, dict[str, bytes]]:
    """Return the records of the users with these sorted hashes by hash and table, computed without copies."""
    folder = write_selected_users(work.build.root / PARTITION_FOLDER, work.number, hashes, scratch)
    limit, records_by_hash = work.build.config.history_limit, dict[int, dict[str, bytes]]()
    entities = read_shard(
        folder,
        work.number,
        history_limit=limit,
        answers_without_history=computes_featured(work.build),
    )
    digests = digest_users(entities, work.items.directory.hashes())
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
