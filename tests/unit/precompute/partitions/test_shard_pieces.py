"""Pieces of a shard: hash ranges of its mapped files, if each batch lies in their order."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from precompute.partitions import shard_input
from precompute.partitions.shard_files import (
    BASE_FILE_KINDS,
    HASH_COLUMN,
    ShardFiles,
    first_hash,
    range_count_per_shard,
    range_of,
    shard_of,
    shard_paths,
)
from precompute.partitions.shard_input import ShardPieces, group_rows_by_entity, join_shard_inputs, read_shard
from precompute.partitions.user_tables import USER_IDS_SCHEMA

SHARDS, SHARD = 3, 1
LIMIT = 50
ROWS = pa.schema([(HASH_COLUMN, pa.uint64()), ("ordinal", pa.int32()), ("time", pa.int64())])


def write_shards(folder: Path, *, in_order: bool, batches: int = 5, users: int = 400) -> None:
    """A partition of drawn rows: each batch in the order of hash ranges, as `begin` writes it, or of shards only."""
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 2**64, users, np.uint64)
    ranges = range_count_per_shard(SHARDS) if in_order else 1
    numbers = range_of if in_order else shard_of
    for kind, schema in zip(BASE_FILE_KINDS, (ROWS, USER_IDS_SCHEMA, USER_IDS_SCHEMA), strict=True):
        paths = [folder / f"{shard:04d}.{kind}" for shard in range(SHARDS)]
        with ShardFiles(paths, schema, ranges_per_file=ranges) as files:
            for _ in range(batches):
                rows = rng.integers(0, users, 4 * users)
                if kind == "ids":
                    rows = np.arange(users)
                texts = pa.array([f"user {row}" for row in rows])
                columns = [texts, hashes[rows]]
                if kind == "rows":
                    drawn = rng.integers(-1, 40, len(rows)), rng.integers(0, 99, len(rows))
                    columns = [hashes[rows], drawn[0].astype(np.int32), drawn[1]]
                if kind != "features":
                    files.write(pa.table(columns, schema=schema), numbers(hashes[rows], SHARDS))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_input, "PIECE_ROWS", 100)
    monkeypatch.setattr(shard_input, "PIECE_ROWS_PER_BATCH_MIN", 1)


def test_pieces_together_are_the_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, in_order=True)
    pieces = ShardPieces.open(tmp_path, SHARD, SHARDS)
    assert pieces is not None and len(pieces.range_numbers) > 8

    parts = [group_rows_by_entity(pieces.tables(number), history_limit=LIMIT) for number in pieces.range_numbers]
    pieces.let_go()

    total = SHARDS * len(pieces.range_numbers)
    for number, part in zip(pieces.range_numbers, parts, strict=True):
        assert (shard_of(part.entity_hashes, total) == number).all()
    whole_shard, joined_pieces = (read_shard(tmp_path, SHARD, history_limit=LIMIT), join_shard_inputs(parts))
    assert len(whole_shard.entity_hashes) > 100
    assert joined_pieces.entity_ids.equals(whole_shard.entity_ids)
    for name in ("entity_hashes", "history_indptr", "history_ordinals"):
        assert np.array_equal(getattr(joined_pieces, name), getattr(whole_shard, name)), name


def test_a_shard_whose_batches_lie_otherwise_has_no_pieces(tmp_path: Path) -> None:
    write_shards(tmp_path, in_order=False)
    assert ShardPieces.open(tmp_path, SHARD, SHARDS) is None


def test_one_row_out_of_order_is_seen(tmp_path: Path) -> None:
    write_shards(tmp_path, in_order=True)
    (path,) = shard_paths(tmp_path, SHARD, ("rows",))
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    moved = pa.concat_tables([table.slice(1), table.slice(0, 1)]).combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, ROWS) as writer:
        writer.write_table(moved)
    assert ShardPieces.open(tmp_path, SHARD, SHARDS) is None


def test_a_shard_without_rows_is_one_piece(tmp_path: Path) -> None:
    write_shards(tmp_path, in_order=True, batches=0)
    pieces = ShardPieces.open(tmp_path, SHARD, SHARDS)
    assert pieces is not None
    assert list(pieces.range_numbers) == [SHARD] and pieces.slice_count == 1
    assert len(group_rows_by_entity(pieces.tables(SHARD), history_limit=LIMIT).entity_hashes) == 0


def test_a_shard_too_large_for_its_ranges_has_no_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, in_order=True)
    monkeypatch.setattr(shard_input, "SLICE_ROWS_MAX", 1)
    assert ShardPieces.open(tmp_path, SHARD, SHARDS) is None


@pytest.mark.parametrize("shards", [1, 3, 257, 4096, 65_536])
def test_ranges_of_a_shard_end_where_it_ends(shards: int) -> None:
    ranges = range_count_per_shard(shards)
    assert shards * ranges <= 1 << 16
    firsts = [first_hash(number, shards) for number in range(shards)]
    edges = np.array([*firsts, *(first - 1 for first in firsts[1:]), 2**64 - 1], np.uint64)
    assert (range_of(edges, shards) // ranges == shard_of(edges, shards)).all()
    exact = [int(edge) * shards >> 64 for edge in edges.tolist()]
    assert shard_of(edges, shards).tolist() == exact
