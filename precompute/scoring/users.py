"""Scoring of one shard's users: reading, encoding, comparing and writing overlap; files are in hash order."""

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
from precompute.scoring.copies import REASON_NAMES, CopyDecisions, inputs_path, reasons_path
from precompute.scoring.pages import Answers, GrowingFile, PageFile, describe_pages, encode_records
from precompute.scoring.scorers import Scorers
from precompute.scoring.shard_work import Chunk, ShardWork
from precompute.scoring.towers import computes_feature_only_users
from precompute.scoring.user_reading import read_users, split_into_chunks, time_reads
from precompute.sources.unusable import PRECISION_REASON


def score_users(build: Build, bundle: Bundle, shard: int, scorers: Scorers, progress: Progress) -> UserScores:
    """Score all user tables of one shard; return the shard's report. Memory does not depend on the number of users."""
    start_s = time.perf_counter()
    work = ShardWork.of(build, bundle, shard, scorers)
    directory_path, inputs_file_path = directory_file_path("user", shard), inputs_path(shard)
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(build.root / PARTITION_FOLDER))
        page_files = {
            table_name: stack.enter_context(
                PageFile(build.path(work.pages_path(table_name)), layout, build.config.page_bytes)
            )
            for table_name, layout in work.layout_by_table.items()
        }
        directory_writer = stack.enter_context(GrowingFile(build.path(directory_path)))
        digests_file = stack.enter_context(GrowingFile(build.path(inputs_file_path)))
        seen_file_by_part = {
            table_name: stack.enter_context(GrowingFile(build.path(path)))
            for table_name, path in work.seen_files.items()
        }
        reasons = None
        if work.user_copies is not None:
            reasons = stack.enter_context(GrowingFile(build.path(reasons_path(shard))))
        stages = stack.enter_context(StreamStages())  # entered last, so stopped before the resources it uses are closed
        read_chunks = stages.run_ahead(time_reads(work, read_users(work, scratch, digests_file)))
        encoded_chunks = stages.map_values(
            work.add_tower_outputs, work.open_towers_first(read_chunks), thread_count=work.worker_count
        )
        scored_chunks = stages.run_ahead(work.score_chunks(encoded_chunks))
        for chunk in stages.map_values(partial(add_records, work), scored_chunks, thread_count=work.worker_count):
            with work.add_stage_time("write"):
                write_records(work, chunk, page_files, directory_writer, reasons)
                if seen_file_by_part:
                    write_inputs(work, chunk, seen_file_by_part)
            progress(f"score shard {shard}", chunk.entities_so_far, chunk.shard_entity_count)
    scored_count = work.count_by_name["scored"]
    return {
        "entities": work.count_by_name["entities"],
        "scored": scored_count,
        "without_input": work.count_by_name["entities"] - scored_count,
        "short": work.count_by_name["short"],
        "unusable": work.unusable.to_json(),
        "seconds": {**work.seconds_by_stage, "all": time.perf_counter() - start_s},
        "reasons": None
        if work.user_copies is None
        else {table_name: work.count_by_name[table_name] for table_name in REASON_NAMES},
        "directory": file_entry(build.describe(directory_path)),
        "inputs": file_entry(build.describe(inputs_file_path)),
        "seen": [file_entry(build.describe(path)) for path in work.seen_files.values()],
        "tables": {table_name: describe_pages(build, file) for table_name, file in page_files.items()},
    }


def add_records(work: ShardWork, chunk: Chunk) -> Chunk:
    """Add the records of each table to a chunk, and drop its outputs and lists, which no later stage needs."""
    with work.add_stage_time("records"):
        for table_name, table in work.tables.items():
            chunk_records = compute_own_records(work, table_name, table, chunk)
            chunk.records_by_table[table_name] = _with_copies(work, table_name, chunk, chunk_records)
    chunk.outputs_by_model, chunk.lists_by_table = {}, {}
    return chunk


def compute_own_records(work: ShardWork, table_name: str, table: TableConfig, chunk: Chunk) -> NDArray[Any]:
    """Return the records of the chunk's own users in this table."""
    model = str(table.value) if table.kind == "value" else "user_tower"
    answers: Answers = chunk.outputs_by_model[model]
    has_answer = chunk.is_answered_by_model[model]
    if table.kind == "user_topk":
        if not len(chunk.user_ids):
            return np.empty(0, work.layout_by_table[table_name].dtype)
        answers = chunk.lists_by_table.pop(table_name)
        if table_name not in work.allowed_masks:  # lists under a filter may be short; a gate checks those
            possible_counts = np.minimum(table.k, work.items.count - np.diff(chunk.seen_items.indptr))
            is_short = (answers[0] != NO_ITEM).sum(axis=1) < possible_counts
            chunk.short_list_count += int((is_short & has_answer).sum())
    cut_s = data_until_of(work.build.generation)
    records, is_unfit = encode_records(
        work.layout_by_table[table_name], chunk.user_fingerprints, answers, has_answer, cut_s
    )
    if is_unfit.any():
        is_set_by_events = work.are_set_by_events(chunk)
        chunk.unusable.note_rows(
            f"records of {table_name}", {PRECISION_REASON: is_unfit}, chunk.user_case, is_set_by_events
        )
    if table.kind != "user_topk" and work.user_copies is not None and table_name in work.user_copies.table_names:
        unchanged_rows = np.flatnonzero(chunk.copied_users.unchanged_positions >= 0)
        records[unchanged_rows] = work.user_copies.read_records(
            table_name, chunk.copied_users.unchanged_positions[unchanged_rows], cut_s
        )
        has_answer = has_answer | (chunk.copied_users.unchanged_positions >= 0)
    chunk.unusable.count_checked(f"records of {table_name}", int(has_answer.sum()))
    return records


def _with_copies(work: ShardWork, table_name: str, chunk: Chunk, chunk_records: NDArray[Any]) -> NDArray[Any]:
    """Return the records of all users of a chunk's range, own and copied ones."""
    copied_users = chunk.copied_users
    copied_rows = copied_users.copied_rows
    if work.user_copies is None or not len(copied_rows):
        return chunk_records
    chunk.unusable.count_checked(f"records of {table_name}", len(copied_rows))
    cut_s = data_until_of(work.build.generation)
    if len(copied_rows) == len(copied_users.user_hashes):
        return work.user_copies.read_records(table_name, copied_users.copied_positions, cut_s)
    records = np.empty(len(copied_users.user_hashes), chunk_records.dtype)
    records[copied_users.own_rows] = chunk_records
    records[copied_rows] = work.user_copies.read_records(table_name, copied_users.copied_positions[copied_rows], cut_s)
    return records


def write_records(
    work: ShardWork,
    chunk: Chunk,
    page_files: Mapping[str, PageFile],
    directory_writer: GrowingFile,
    reasons_writer: GrowingFile | None,
) -> None:
    """Write the records and reasons of a chunk, in hash order; add the chunk's counts."""
    for table_name in work.tables:
        page_files[table_name].append(chunk.records_by_table.pop(table_name))
    copied_users = chunk.copied_users
    directory_writer.write_array(copied_users.user_hashes.astype("<u8", copy=False))
    work.unusable.add_report(chunk.unusable.to_json())
    work.count_by_name["scored"] += len(copied_users.user_hashes)
    work.count_by_name["short"] += chunk.short_list_count
    reason_numbers = copied_users.reason_numbers()
    for reason_number, table_name in enumerate(REASON_NAMES):
        work.count_by_name[table_name] += int((reason_numbers == reason_number).sum())
    if reasons_writer is not None:
        reasons_writer.write_array(reason_numbers)


def write_inputs(work: ShardWork, chunk: Chunk, seen_file_by_part: Mapping[str, GrowingFile]) -> None:
    """Write the published inputs of the users of a chunk's range, own and copied ones, in hash order."""
    copied_users, inputs = chunk.copied_users, chunk.published_inputs
    copied_rows = copied_users.copied_rows
    if work.user_copies is not None and len(copied_rows):
        inputs = copied_users.merge_inputs(
            inputs, work.user_copies.read_inputs(copied_users.copied_positions[copied_rows])
        )
    _write_ends(work, "seen", inputs.seen_items, seen_file_by_part["ends"])
    seen_file_by_part["items"].write_array(inputs.seen_items.indices.astype("<u4"))
    if inputs.seen_item_times is not None:
        seen_file_by_part["times"].write_array(inputs.seen_item_times.indices.astype("<i8"))
    if inputs.feature_json is not None:
        _write_ends(work, "given", inputs.feature_json, seen_file_by_part["feature_ends"])
        seen_file_by_part["features"].write_array(inputs.feature_json.indices.astype("u1"))
    if inputs.has_own_vector is not None:
        seen_file_by_part["brought"].write_array(inputs.has_own_vector.astype("u1"))


def _write_ends(work: ShardWork, count_name: str, ragged_rows: Histories, ends_file: GrowingFile) -> None:
    """Write the end offset of each row, counted over all chunks."""
    ends_file.write_array((work.count_by_name[count_name] + ragged_rows.indptr[1:]).astype("<u8"))
    work.count_by_name[count_name] += int(ragged_rows.indptr[-1])


def recompute_users(work: ShardWork, user_hashes: NDArray[np.uint64], scratch: Path) -> dict[int, dict[str, bytes]]:
    """Compute the records of the users with these sorted hashes, without copies; return bytes by hash and table."""
    folder = write_selected_users(work.build.root / PARTITION_FOLDER, work.shard, user_hashes, scratch)
    history_limit, records_by_hash = work.build.config.history_limit, dict[int, dict[str, bytes]]()
    entities = read_shard(
        folder, work.shard, history_limit=history_limit, answers_without_history=computes_feature_only_users(work.build)
    )
    digests = digest_users(entities, work.items.directory.hashes())
    for chunk, _ in split_into_chunks(work, CopyDecisions.without_copies(entities, digests), entities)[0]:
        chunk = work.add_lists(work.add_tower_outputs(chunk))
        records_by_table = {
            table_name: compute_own_records(work, table_name, table, chunk) for table_name, table in work.tables.items()
        }
        for row, user_hash in enumerate(chunk.user_hashes.tolist()):
            records_by_hash[user_hash] = {
                table_name: records[row].tobytes() for table_name, records in records_by_table.items()
            }
    return records_by_hash
