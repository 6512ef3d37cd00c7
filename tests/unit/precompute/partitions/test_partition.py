"""Reading sources and partitioning them by hash range."""

import gzip
import resource
import shutil
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ConfigError, CorruptArtefact, SourceError
from cache.format.directory import Directory
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable, Ordinals
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.records import Layout, encode_numbers
from precompute.config.settings import NightConfig, Sources, parse_time
from precompute.partitions import shard_files
from precompute.partitions.grouping import order_if_distinct, positions_of_hashes
from precompute.partitions.holdout import Holdout
from precompute.partitions.night_input import NightInput
from precompute.partitions.partition import PartitionJob
from precompute.partitions.shard_files import (
    BASE_FILE_KINDS,
    HASH_COLUMN,
    PARTITION_FOLDER,
    ShardFiles,
    first_hash,
    read_stream,
    shard_of,
    user_naming_kinds,
)
from precompute.partitions.shard_input import ShardInput, count_distinct_ids, read_shard, slice_shard
from precompute.scoring import input_samples
from precompute.scoring.pages import PageFile
from precompute.scoring.towers import select_usable_inputs
from precompute.sources.features import read_feature_values
from precompute.sources.readers import Interactions, read_interactions

USERS = ["007", "7", "ü/1", "u4", "u5"]


def item_table(ids, seed=0):
    order = np.argsort(hash_ids(ids, seed))
    placed = [ids[index] for index in order]
    offsets = np.concatenate([[0], np.cumsum([len(raw) for raw in placed])]).astype(np.uint64)
    return ItemTable(
        Directory(seed, [0], [hash_ids(placed, seed)]),
        np.frombuffer(b"".join(placed), np.uint8),
        offsets,
        np.empty((0, 0), np.float32),
        np.arange(len(ids), dtype=np.int64)[order],
    )


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(3)
    users = rng.choice(USERS, 300)
    items = [f"i{number}" for number in rng.integers(0, 20, 300)]
    times = rng.integers(1_000, 2_000, 300)
    pq.write_table(pa.table({"user": users, "item": items, "timestamp": times}), tmp_path / "a.parquet")
    return NightConfig(base=str(tmp_path), shards=3, sources=Sources(interactions=("a.parquet",)))


ITEMS = [f"i{number}".encode() for number in range(15)]


def histories(config, tmp_path, **options):
    items = item_table(ITEMS)
    partition_result = PartitionJob(NightInput(config, items), tmp_path / "work", **options).run()
    history_by_user = {}
    for shard in range(config.shards):
        part = read_shard(tmp_path / "work", shard, history_limit=1000)
        assert (part.entity_hashes[1:] > part.entity_hashes[:-1]).all()
        for row, name in enumerate(part.entity_ids.to_pylist()):
            ordinals = part.history_ordinals[part.history_indptr[row] : part.history_indptr[row + 1]]
            history_by_user[name] = items.ids_of(ordinals.astype(np.uint32))
    return partition_result, history_by_user


def expected(config):
    table = pq.read_table(config.path("a.parquet")).to_pylist()
    times_by_user: dict[str, dict[str, int]] = {}
    for row in sorted(table, key=lambda interaction: interaction["timestamp"]):
        time_by_item = times_by_user.setdefault(row["user"], {})
        time_by_item.pop(row["item"], None)
        if row["item"].encode() in ITEMS:
            time_by_item[row["item"]] = row["timestamp"]
    return times_by_user


def test_every_user_lands_in_one_shard_with_known_items_once_and_in_order(config, tmp_path):
    partition_result, history_by_user = histories(config, tmp_path)

    times_by_user = expected(config)
    assert history_by_user.keys() == times_by_user.keys() == set(USERS)
    for user, history in history_by_user.items():
        times = [times_by_user[user][item] for item in history]
        assert set(history) == set(times_by_user[user]) and times == sorted(times)
    assert partition_result.user_count == len(USERS) and partition_result.interaction_counts.interaction_count == 300
    assert (
        partition_result.interaction_counts.unknown_item_interactions
        + int(partition_result.interaction_counts.interactions_by_item.sum())
        == 300
    )


def test_two_ids_with_one_hash_lead_to_the_next_seed(config, tmp_path):
    def weak(raws, seed):
        return hash_ids(raws, seed) if seed else np.zeros(len(raws), np.uint64)

    partition_result, history_by_user = histories(config, tmp_path, hasher=weak)
    assert partition_result.hash_seed == 1 and set(history_by_user) == set(USERS)
    assert order_if_distinct(weak([b"a", b"b"], 0)) is None


def test_the_cut_keeps_what_is_strictly_older(config, tmp_path):
    batches = list(read_interactions(config.sources, tmp_path, cutoff_at=parse_time("1970-01-01T00:25:00Z")))
    table = pq.read_table(tmp_path / "a.parquet")
    assert sum(len(batch.times_us) for batch in batches) == sum(t < 1500 for t in table["timestamp"].to_pylist())


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
def test_ranges_tile_the_whole_hash(shards):
    firsts = [first_hash(shard, shards) for shard in range(shards)]
    assert firsts[0] == 0 and firsts == sorted(set(firsts))
    edges = np.array([edge for first in firsts[1:] for edge in (first - 1, first)], np.uint64)
    assert shard_of(edges, shards).tolist() == [index // 2 + index % 2 for index in range(len(edges))]
    assert shard_of(np.array([0, 2**64 - 1], np.uint64), shards).tolist() == [0, shards - 1]


def test_csv_ids_keep_their_zeros_and_weights_of_zero_are_no_interactions(tmp_path):
    (tmp_path / "a.csv").write_text("user,item,weight\n007,1,1\n007,2,0\n7,01,2.5\n")
    batch = next(iter(read_interactions(Sources(interactions=("a.csv",)), tmp_path)))
    assert (batch.user_ids.row_texts().to_pylist(), batch.item_ids.row_texts().to_pylist()) == (
        ["007", "7"],
        ["1", "01"],
    )


def test_the_line_format_is_read_packed_or_not(tmp_path):
    for name, opener in (("a.txt", open), ("a.txt.gz", gzip.open)):
        with opener(tmp_path / name, "wt") as file:
            file.write("0 5 6\n\n1 007\n2\n")
        batch = next(iter(read_interactions(Sources(interactions=(name,)), tmp_path)))
        assert batch.user_ids.row_texts().to_pylist() == ["0", "0", "1"]
        assert batch.item_ids.row_texts().to_pylist() == ["5", "6", "007"]


def test_integer_ids_become_decimal(tmp_path):
    pq.write_table(pa.table({"user": [1], "item": [2**40]}), tmp_path / "a.parquet")
    batch = next(iter(read_interactions(Sources(interactions=("a.parquet",)), tmp_path)))
    assert (batch.user_ids.row_texts().to_pylist(), batch.item_ids.row_texts().to_pylist()) == (["1"], [str(2**40)])


@pytest.mark.parametrize(
    ("columns", "message_pattern"),
    [
        ({"user": [1.5], "item": ["a"]}, "double.*write the column as Int64"),
        ({"user": ["a"], "thing": ["b"]}, "no column 'item'"),
        ({"user": pa.nulls(2, pa.string()), "item": ["b", "c"]}, r"user: no id \(2, e.g. item 'b'"),
        ({"user": [""], "item": ["b"]}, "user: an id of 0 or more than 256 bytes"),
        ({"user": ["x" * 257], "item": ["b"]}, "more than 256 bytes.*'x{256}"),
        ({"user": ["x"], "item": ["b"], "timestamp": ["noon"]}, "timestamp: no time that can be read"),
    ],
)
def test_a_source_that_cannot_be_right_is_refused_by_name(tmp_path, columns, message_pattern):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=message_pattern):
        list(read_interactions(Sources(interactions=("a.parquet",)), tmp_path))


def test_a_pattern_without_a_file_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="no source file"):
        list(read_interactions(Sources(interactions=("*.parquet",)), tmp_path))


def test_models_get_the_newest_items_of_a_long_history_and_nothing_of_it_comes_back(config, tmp_path):
    """What lay beyond the limit could come back into a list, and the gate that looks had the same limit."""
    _partition_result, history_by_user = histories(config, tmp_path)
    items, spec = item_table(ITEMS), InputSpec("past", "history", "int32", max_length=99, pad=-1)
    for shard in range(config.shards):
        part = read_shard(tmp_path / "work", shard, history_limit=4)
        _, model_histories, _ = select_usable_inputs(items, part, {"user_tower": TowerSpec((spec,), "v", 4)})
        for row, name in enumerate(part.entity_ids.to_pylist()):
            ordinals = part.history_ordinals[part.history_indptr[row] : part.history_indptr[row + 1]]
            assert items.ids_of(ordinals.astype(np.uint32)) == history_by_user[name]
            model_indices = model_histories.indices[model_histories.indptr[row] : model_histories.indptr[row + 1]]
            assert model_indices.tolist() == items.model_indices_of(Ordinals(ordinals[-4:])).tolist()


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_slices_hold_the_shard_in_hash_order(config, tmp_path, rows):
    pq.write_table(pa.table({"user": ["u4", "quiet"], "age": [4, 5]}), tmp_path / "users.parquet")
    config = replace(config, sources=replace(config.sources, user_features="users.parquet"))
    folder, scratch = tmp_path / "work", tmp_path / "scratch"
    PartitionJob(NightInput(config, item_table(ITEMS)), folder, feature_columns=["age"]).run()
    for shard in range(config.shards):
        whole_shard = read_shard(folder, shard, history_limit=9)
        slices = slice_shard(folder, shard, config.shards, scratch, slice_rows_max=rows)
        assert len(slices.slice_numbers) > 1 or not len(whole_shard.entity_ids)
        parts = [read_shard(slices.folder, number, history_limit=9) for number in slices.slice_numbers]
        distinct_counts = [
            (len(set(part.entity_ids.to_pylist())), len(set(part.entity_hashes.tolist()))) for part in parts
        ]
        assert list(count_distinct_ids(slices)) == distinct_counts
        assert pa.concat_arrays([part.entity_ids for part in parts]) == whole_shard.entity_ids
        for name in ("entity_hashes", "history_ordinals"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(joined, getattr(whole_shard, name))
        counts = np.concatenate([np.diff(part.history_indptr) for part in parts])
        assert np.array_equal(counts, np.diff(whole_shard.history_indptr))
        ages = [age for part in parts for age in part.features["age"].to_pylist()]
        assert ages == whole_shard.features["age"].to_pylist()
        shutil.rmtree(scratch, ignore_errors=True)


def test_many_slices_are_cut_in_two_passes_with_few_files_open(config, tmp_path, monkeypatch):
    """1,024 descriptors are all that many hosts allow; a shard of a billion rows has as many slices."""
    folder, scratch = tmp_path / "work", tmp_path / "scratch"
    PartitionJob(NightInput(replace(config, shards=1), item_table(ITEMS)), folder).run()
    whole_shard = read_shard(folder, 0, history_limit=9)
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_FILES_MAX", 9)
    opened = []
    init = ShardFiles.__init__

    def counting(self, paths, schema, **options):
        opened.append(len(paths))
        init(self, paths, schema, **options)

    monkeypatch.setattr(ShardFiles, "__init__", counting)

    slices = slice_shard(folder, 0, 1, scratch, slice_rows_max=5)

    parts = [read_shard(slices.folder, number, history_limit=9) for number in slices.slice_numbers]
    assert pa.concat_arrays([part.entity_ids for part in parts]) == whole_shard.entity_ids
    assert len(parts) > 9 >= max(opened)
    assert not list((scratch / "rough").iterdir())


def test_wide_features_make_slices_smaller(config, tmp_path, monkeypatch):
    users = ["u4", "u5", "007", "7", "ü/1"]
    wide = pa.array([[float(number)] * 500 for number in range(5)], pa.list_(pa.float32()))
    pq.write_table(pa.table({"user": users, "taste": wide}), tmp_path / "users.parquet")
    config = replace(config, shards=1, sources=replace(config.sources, user_features="users.parquet"))
    folder = tmp_path / "work"
    PartitionJob(NightInput(config, item_table(ITEMS)), folder, feature_columns=["taste"]).run()
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_BYTES_MAX", 6_000)

    slices = slice_shard(folder, 0, 1, tmp_path / "scratch")
    namings = slice_shard(
        folder, 0, 1, tmp_path / "naming", slice_rows_max=3, file_kinds=user_naming_kinds(BASE_FILE_KINDS)
    )

    assert len(slices.slice_numbers) >= 2
    assert read_stream(tmp_path / f"naming/{namings.slice_numbers[0]:04d}.features").column_names == [
        "user", HASH_COLUMN,
    ]  # fmt: skip


def test_only_the_first_slices_are_written_where_no_more_are_wanted(config, tmp_path):
    folder = tmp_path / "work"
    PartitionJob(NightInput(replace(config, shards=1), item_table(ITEMS)), folder).run()
    every = slice_shard(folder, 0, 1, tmp_path / "all", slice_rows_max=3)
    first = slice_shard(folder, 0, 1, tmp_path / "first", slice_rows_max=3, first_slices_max=2)

    assert list(first.slice_numbers) == list(every.slice_numbers)[:2]
    for number in first.slice_numbers:
        limited_slice, theirs = (read_shard(slices.folder, number, history_limit=9) for slices in (first, every))
        assert limited_slice.entity_ids == theirs.entity_ids
    assert len(list(first.folder.iterdir())) == 2 * 3


def test_samples_come_from_slices_and_never_from_a_whole_shard(config, tmp_path, monkeypatch):
    folder, items = tmp_path / PARTITION_FOLDER, item_table(ITEMS)
    PartitionJob(NightInput(config, items), folder).run()
    whole_shards = [read_shard(folder, shard, history_limit=9) for shard in range(config.shards)]
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_ROWS_MAX", 3)
    monkeypatch.setattr(input_samples, "fetch_partition", lambda *_: None)

    sampled_parts: list[ShardInput] = []

    def reject_part(_items: ItemTable, part: ShardInput, _specs: Any) -> Any:
        sampled_parts.append(part)
        return np.empty(0, np.int64), None, {}

    monkeypatch.setattr(input_samples, "select_usable_inputs", reject_part)
    fake_build: Any = SimpleNamespace(config=config, root=tmp_path, need_report=lambda _report: {})
    model: Any = SimpleNamespace(name="user_tower", spec=None)
    with pytest.raises(SourceError, match="no entity of the sources has the inputs"):
        input_samples.sample_inputs(fake_build, items, model)

    assert pa.concat_arrays([part.entity_ids for part in sampled_parts]) == pa.concat_arrays(
        [part.entity_ids for part in whole_shards]
    )
    assert len(sampled_parts) > sum(1 for part in whole_shards if len(part.entity_ids))
    assert not list(folder.glob(".slices*"))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200, unique=True).map(sorted), st.data())
def test_every_hash_is_found_where_it_lies(hashes, data):
    """Evenly spread or not: what is crowded or lone takes longer, no other place."""
    sorted_hashes = np.array(hashes, np.uint64)
    positions = data.draw(st.lists(st.integers(0, len(hashes) - 1), max_size=50))
    assert positions_of_hashes(sorted_hashes, sorted_hashes[positions]).tolist() == positions

    stranger = data.draw(st.integers(0, 2**64 - 1).filter(lambda candidate_hash: candidate_hash not in hashes))
    with pytest.raises(CorruptArtefact, match="whose ids it lacks"):
        positions_of_hashes(sorted_hashes, np.array([hashes[0], stranger], np.uint64))


def test_rows_without_ids_are_corrupt(config, tmp_path):
    PartitionJob(NightInput(replace(config, shards=1), item_table(ITEMS)), tmp_path / "work").run()
    ids = tmp_path / "work/0000.ids"
    schema = read_stream(ids).schema
    with ShardFiles([ids], schema):
        pass
    with pytest.raises(CorruptArtefact, match="whose ids it lacks"):
        read_shard(tmp_path / "work", 0, history_limit=4)


def test_a_collision_within_a_slice_is_seen(config, tmp_path, monkeypatch):
    monkeypatch.setattr("precompute.partitions.shard_input.SLICE_ROWS_MAX", 1)
    seeds = []

    def colliding(raws, seed):
        seeds.append(seed)
        return hash_ids(raws, seed) if seed else np.zeros(len(raws), np.uint64)

    night = NightInput(config, item_table(ITEMS))
    partition_result = PartitionJob(night, tmp_path / "work", hasher=colliding).run()
    assert partition_result.hash_seed == 1
    assert set(seeds) == {0, 1}
    assert not list((tmp_path / "work").glob(".slices*"))


def test_features_are_aligned_with_their_entities(config, tmp_path):
    pq.write_table(pa.table({"user": ["u4", "only-features", "007"], "age": [40, 50, 7]}), tmp_path / "users.parquet")
    config = replace(config, sources=replace(config.sources, user_features="users.parquet"))
    PartitionJob(NightInput(config, item_table(ITEMS)), tmp_path / "work", feature_columns=["age"]).run()
    ages: dict[str, int | None] = {}
    for shard in range(config.shards):
        part = read_shard(tmp_path / "work", shard, history_limit=10)
        ages |= dict(zip(part.entity_ids.to_pylist(), part.features["age"].to_pylist(), strict=True))
    assert ages == {"007": 7, "7": None, "ü/1": None, "u4": 40, "u5": None, "only-features": 50}


def test_a_given_up_partition_and_its_retry_do_not_share_a_file(tmp_path):
    """A zombie task goes on writing while its retry runs: each finishes a whole file of its own."""
    schema = pa.schema([("user", pa.string())])
    late = pa.table({"user": [f"late-{number}" for number in range(900)]})
    table = pa.table({"user": [f"u{number}" for number in range(1000)]})
    shards = np.zeros(len(table), np.int64)
    zombie, retry = (ShardFiles([tmp_path / "0000.rows"], schema) for _ in range(2))
    with zombie:
        zombie.write(late, shards[:900])
        with retry:
            retry.write(table, shards)
            zombie.write(late, shards[:900])
        assert read_stream(tmp_path / "0000.rows") == table
        with pytest.raises(KeyError), ShardFiles([tmp_path / "0000.rows"], schema):
            raise KeyError
    assert read_stream(tmp_path / "0000.rows") == pa.concat_tables([late, late])
    assert [path.name for path in tmp_path.iterdir()] == ["0000.rows"]


def test_a_given_up_page_file_and_its_retry_do_not_share_a_file(tmp_path):
    layout = Layout("vector", 16, "f4")
    fingerprints, values = np.arange(2000, dtype=np.uint64), np.ones((2000, 16), np.float32)
    records = encode_numbers(layout, fingerprints, values, 0)
    path = tmp_path / "0000.pages"
    with PageFile(path, layout, 4096) as zombie:
        zombie.append(records[:1000])
        with PageFile(path, layout, 4096) as retry:
            zombie.append(records[1000:])
            retry.append(records)
        assert path.read_bytes() == records.tobytes()
        with pytest.raises(KeyError), PageFile(path, layout, 4096):
            raise KeyError
    assert path.read_bytes() == records.tobytes()
    assert {file_path.name for file_path in tmp_path.iterdir()} == {"0000.pages", "0000.sums"}


def test_two_models_that_name_an_input_alike_get_their_own_columns():
    entities = ShardInput(
        pa.array(["a", "b", "c"]),
        np.zeros(3, np.uint64),
        np.array([0, 1, 2, 2]),
        np.array([0, 1]),
        {"country": pa.array([1, 2, None]), "city": pa.array([98, None, 99])},
    )
    specs = {
        name: TowerSpec((InputSpec("x", "feature", "int64", column=name),), "v", 4) for name in ("country", "city")
    }
    usable, _, features = select_usable_inputs(item_table(ITEMS), entities, specs)
    assert usable.tolist() == [0]
    assert (features["country"]["x"][0], features["city"]["x"][0]) == (1, 98)


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 256)])
def test_wide_features_are_never_numbers_of_python(kind):
    """32 bytes for each number: a slice of a million users with 768 numbers took 25 GB."""
    rows, wide = 2_000, InputSpec("x", "feature", "float32", column="taste", width=256)
    expected_numbers = np.random.default_rng(1).standard_normal((rows, 256)).astype(np.float32)
    lengths = None if pa.types.is_fixed_size_list(kind) else pa.array(np.arange(rows + 1) * 256)
    values = pa.array(expected_numbers.ravel(), kind.value_type)
    if lengths is None:
        column = pa.FixedSizeListArray.from_arrays(values, 256)
    elif pa.types.is_large_list(kind):
        column = pa.LargeListArray.from_arrays(lengths, values)
    else:
        column = pa.ListArray.from_arrays(lengths.cast(pa.int32()), values)

    tracemalloc.start()
    numbers = read_feature_values(column[500:], wide).input_numbers
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert np.array_equal(numbers, expected_numbers[500:])
    assert peak < 2 * numbers.nbytes


def test_a_pass_that_is_repeated_restarts_the_holdout(config, tmp_path):
    """A collision of hashes reads the sources again: each late batch came twice."""
    night = NightInput(config, item_table(ITEMS), parse_time("1970-01-01T00:25:00Z"))

    def colliding(raws, seed):
        return hash_ids(raws, seed) if seed else np.zeros(len(raws), np.uint64)

    repeated, single = CountingHoldout(), CountingHoldout()
    PartitionJob(night, tmp_path / "work", holdout=repeated, hasher=colliding).run()
    PartitionJob(night, tmp_path / "again", holdout=single).run()

    assert repeated.late_counts == single.late_counts and any(single.late_counts)


class CountingHoldout(Holdout):
    """Holdout that counts the rows of each late batch since it was restarted."""

    def restart(self) -> None:
        super().restart()
        self.late_counts: list[int] = []

    def add(self, late: Interactions) -> None:
        super().add(late)
        self.late_counts.append(len(late.times_us))


def test_more_files_are_allowed_or_refused_by_name(config, tmp_path, monkeypatch):
    """1,024 shards hold 2,048 files open, and 1,024 is what many systems allow unless asked."""
    limits = [(1024, 2048)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new_limits: limits.append(new_limits))

    shard_files.allow_open_files(1000)
    assert limits[-1] == (1000 + shard_files.SPARE_DESCRIPTORS, 2048)
    shard_files.allow_open_files(10)
    assert len(limits) == 2

    with pytest.raises(ConfigError, match=r"may open 2048.*ulimit -n.*fewer shards"):
        PartitionJob(NightInput(replace(config, shards=1000), item_table(ITEMS)), tmp_path / "work").run()
