"""The sample of users says what the night's own reading says, found another way."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from cache.directory import Directory
from cache.keys import hash_ids
from cache.manifest import Artefact, DirectoryPart, EntitySet
from precompute.gates.user_sample import STRATA, read_ids, sample_users, seen_by
from precompute.scoring.shard_files import HASH
from precompute.scoring.shard_input import read_shard

SEED = 4


def write(folder: Path, rows: list[tuple[str, int, int]]) -> tuple[Directory, EntitySet]:
    """One shard of a partition and the directory of all its users."""
    columns = list(zip(*rows, strict=True))
    hashes = hash_ids([user.encode() for user in columns[0]], SEED)
    done = pa.table({HASH: hashes, "ordinal": columns[1], "time": columns[2]})
    ids = pa.table({"user": columns[0], HASH: hashes})
    for kind, each in (("rows", done), ("ids", ids), ("features", ids.slice(0, 0))):
        sink = pa.OSFile(str(folder / f"0000.{kind}"), "wb")
        with sink, pa.ipc.new_stream(sink, each.schema) as writer:
            writer.write_table(each)
    hashes = np.sort(hash_ids([user.encode() for user in sorted(set(columns[0]))], SEED))
    part = DirectoryPart(0, len(hashes), Artefact("", 0, ""))
    return Directory(SEED, [0], [hashes]), EntitySet("user", SEED, len(hashes), (part,))


def clicks(count: int) -> list[tuple[str, int, int]]:
    rng = np.random.default_rng(6)
    return [
        (f"user-{rng.integers(40)}", int(rng.integers(-1, 30)), int(rng.integers(1000)))
        for _ in range(count)
    ]


def test_sampled_histories_are_those_that_the_night_scored(tmp_path: Path) -> None:
    directory, entities = write(tmp_path, clicks(900))
    for limit in (5, 1000):
        night = read_shard(tmp_path, 0, history_limit=limit)
        sample = sample_users(tmp_path, entities, directory, history_limit=limit)
        row_of = {raw: row for row, raw in enumerate(night.ids)}
        for row, raw in enumerate(sample.users.ids):
            theirs = row_of[raw]
            ours = sample.users.ordinals[sample.users.indptr[row] : sample.users.indptr[row + 1]]
            found = night.ordinals[night.indptr[theirs] : night.indptr[theirs + 1]]
            assert ours.tolist() == found.tolist()
        assert sample.with_record == sample.in_source == len(read_ids(tmp_path, 0))
        assert set(sample.rows) == set(STRATA)


def test_a_repeated_choice_is_no_new_one(tmp_path: Path) -> None:
    directory, entities = write(tmp_path, [("a", 1, 10), ("a", 2, 20), ("a", 1, 30), ("b", 1, 5)])
    sample = sample_users(tmp_path, entities, directory, history_limit=10)
    last = dict(zip(sample.users.ids, sample.last.tolist(), strict=True))
    assert last == {b"a": 20, b"b": 5}
    assert seen_by(tmp_path, 0, ["a"]) == {("a", 1), ("a", 2)}
