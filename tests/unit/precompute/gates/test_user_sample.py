"""The sample of users says what the night's own reading says, found another way."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache.errors import CorruptArtefact
from cache.format.directory import Directory
from cache.format.ids import hash_ids
from cache.format.manifest import Artefact, DirectoryPart, EntitySet
from precompute.gates.evidence.evidence import FingerprintFile
from precompute.gates.evidence.user_sample import STRATA, read_seen_pairs, read_user_ids, sample_users
from precompute.gates.rules import records as entities_gate
from precompute.partitions.shard_files import HASH_COLUMN
from precompute.partitions.shard_input import read_shard
from precompute.sources.columns import text_hashes

SEED = 4


def write(folder: Path, rows: list[tuple[str, int, int]]) -> tuple[Directory, EntitySet]:
    """One shard of a partition and the directory of all its users."""
    columns = list(zip(*rows, strict=True))
    hashes = hash_ids([user.encode() for user in columns[0]], SEED)
    interaction_table = pa.table({HASH_COLUMN: hashes, "ordinal": columns[1], "time": columns[2]})
    ids = pa.table({"user": columns[0], HASH_COLUMN: hashes})
    for kind, table in (("rows", interaction_table), ("ids", ids), ("features", ids.slice(0, 0))):
        sink = pa.OSFile(str(folder / f"0000.{kind}"), "wb")
        with sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    hashes = np.sort(hash_ids([user.encode() for user in sorted(set(columns[0]))], SEED))
    part = DirectoryPart(0, len(hashes), Artefact("none", 0, ""))
    return Directory(SEED, [0], [hashes]), EntitySet("user", SEED, len(hashes), (part,))


def clicks(count: int) -> list[tuple[str, int, int]]:
    rng = np.random.default_rng(6)
    return [(f"user-{rng.integers(40)}", int(rng.integers(-1, 30)), int(rng.integers(1000))) for _ in range(count)]


def test_sampled_histories_are_those_that_the_night_scored(tmp_path: Path) -> None:
    directory, entities = write(tmp_path, clicks(900))
    named = {name for texts in read_user_ids(tmp_path, 0) for name in texts.to_pylist()}
    for limit in (5, 1000):
        night = read_shard(tmp_path, 0, history_limit=limit)
        sample = sample_users(tmp_path, entities, directory, history_limit=limit)
        row_of = {name: row for row, name in enumerate(night.entity_ids.to_pylist())}
        for row, name in enumerate(sample.users.entity_ids.to_pylist()):
            theirs = row_of[name]
            sampled_history = sample.users.history_ordinals[
                sample.users.history_indptr[row] : sample.users.history_indptr[row + 1]
            ]
            night_history = night.history_ordinals[night.history_indptr[theirs] : night.history_indptr[theirs + 1]]
            assert sampled_history.tolist() == night_history.tolist()
        assert sample.recorded_user_count == sample.source_user_count == len(named)
        assert set(sample.rows_by_stratum) == set(STRATA)


def test_a_shard_without_a_user_who_has_a_record_gives_no_sample_and_no_error(tmp_path: Path) -> None:
    """With one user and four shards, three are such."""
    _, entities = write(tmp_path, [("user", 0, 1)])
    empty_directory = Directory(SEED, [0], [np.empty(0, np.uint64)])

    sample = sample_users(tmp_path, entities, empty_directory, history_limit=5)

    assert (sample.source_user_count, sample.recorded_user_count, len(sample.directory_positions)) == (1, 0, 0)
    assert all(not len(rows) for rows in sample.rows_by_stratum.values())


def test_users_without_a_record_are_counted_by_the_first_feature_that_they_lack(tmp_path: Path) -> None:
    # Given four users without a record, of whom one lacks the first feature, one the second, one both
    users = ["a", "b", "c", "d"]
    _, entities = write(tmp_path, [(user, 1, 10) for user in users])
    hashes = hash_ids([user.encode() for user in users], SEED)
    features = pa.table(
        {"user": users, HASH_COLUMN: hashes, "age": [None, 30, None, 40], "size": [1.0, None, None, 2.0]}
    )
    with pa.OSFile(str(tmp_path / "0000.features"), "wb") as sink, pa.ipc.new_stream(sink, features.schema) as writer:
        writer.write_table(features)

    # When they are sampled
    empty_directory = Directory(SEED, [0], [np.empty(0, np.uint64)])
    sample = sample_users(tmp_path, entities, empty_directory, history_limit=5)

    # Then each counts once
    assert dict(sample.unrecorded_by_missing_input) == {"a value of 'age'": 2, "a value of 'size'": 1}


def test_a_repeated_choice_is_no_new_one(tmp_path: Path) -> None:
    directory, entities = write(tmp_path, [("a", 1, 10), ("a", 2, 20), ("a", 1, 30), ("b", 1, 5)])
    sample = sample_users(tmp_path, entities, directory, history_limit=10)
    last = dict(zip(sample.users.entity_ids.to_pylist(), sample.last_new_choice_times.tolist(), strict=True))
    assert last == {"a": 20, "b": 5}
    assert read_seen_pairs(tmp_path, 0, ["a"]) == {("a", 1), ("a", 2)}


def test_a_large_shard_is_sampled_from_its_first_slice(tmp_path: Path, monkeypatch) -> None:
    directory, entities = write(tmp_path, clicks(900))
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_ROWS_MAX", 300)
    sample = sample_users(tmp_path, entities, directory, history_limit=10)
    night = read_shard(tmp_path, 0, history_limit=10)
    assert 0 < sample.source_user_count < len(night.entity_ids)
    assert set(sample.users.entity_ids.to_pylist()) <= set(night.entity_ids[: sample.source_user_count].to_pylist())
    assert not list(tmp_path.glob(".slices*"))


def test_rows_of_users_whom_the_partition_does_not_name_are_no_evidence(tmp_path: Path) -> None:
    directory, entities = write(tmp_path, clicks(100))
    incomplete_ids = pa.table({"user": ["user-1"], HASH_COLUMN: hash_ids([b"user-1"], SEED)})
    with pa.OSFile(str(tmp_path / "0000.ids"), "wb") as sink, pa.ipc.new_stream(sink, incomplete_ids.schema) as writer:
        writer.write_table(incomplete_ids)
    with pytest.raises(CorruptArtefact, match="of users that it does not name"):
        sample_users(tmp_path, entities, directory, history_limit=10)


def test_repeated_fingerprints_are_counted_a_range_at_a_time(tmp_path: Path, monkeypatch) -> None:
    """All fingerprints of a table in memory, twice, were 16 bytes for each user and table."""
    monkeypatch.setattr("precompute.gates.evidence.evidence.FINGERPRINTS_AT_ONCE", 1000)
    fingerprints = np.random.default_rng(8).integers(0, 2**64 - 1, 20_000, np.uint64, endpoint=True)
    fingerprints[[5, 17_000]] = fingerprints[9]
    fingerprints[[0, 19_999]] = 2**64 - 1
    fingerprint_file = FingerprintFile(tmp_path)
    for part in np.array_split(fingerprints, 7):
        fingerprint_file.append(part)

    tracemalloc.start()
    assert fingerprint_file.count_repeated() == 3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8 * len(fingerprints)
    assert fingerprint_file.read(17_000, 2).tolist() == fingerprints[17_000:17_002].tolist()
    assert not list(tmp_path.iterdir())


def test_the_names_of_a_shard_never_become_python_objects(tmp_path: Path) -> None:
    """`verify` held all ids of a shard as bytes, some 60 bytes each beside the text."""
    users = pa.array([f"user-{number}" for number in range(100_000)])
    hashes = text_hashes(users, SEED)
    named = pa.table({"user": users, HASH_COLUMN: hashes})
    for kind in ("ids", "features"):
        with pa.OSFile(str(tmp_path / f"0000.{kind}"), "wb") as sink, pa.ipc.new_stream(sink, named.schema) as writer:
            writer.write_table(named, max_chunksize=10_000)
    folder = tmp_path / "work/partition"
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    part = DirectoryPart(0, len(users), Artefact("none", 0, ""))
    candidate: Any = SimpleNamespace(
        root=tmp_path, manifest=SimpleNamespace(entity_sets={"user": EntitySet("user", SEED, len(users), (part,))}),
        evidence=SimpleNamespace(directories={"user": Directory(SEED, [0], [np.sort(hashes)])}),
    )  # fmt: skip

    tracemalloc.start()
    is_named = np.zeros(len(users), np.bool_)
    for _, positions in entities_gate.named_entities(candidate, 0):
        is_named[positions] = True
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert is_named.all() and peak < 2 << 20  # of 6 MB
