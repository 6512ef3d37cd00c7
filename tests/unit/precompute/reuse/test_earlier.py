"""An earlier partition that is taken over, and the files after it: as if all had been read."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.format.directory import Directory
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable
from precompute.config.settings import NightConfig, Sources, parse_time
from precompute.partitions.digests import digest_users
from precompute.partitions.night_input import NightInput
from precompute.partitions.partition import UNKNOWN_ITEMS_SEED, EarlierPartition, PartitionJob, PartitionResult
from precompute.partitions.shard_files import HASH_COLUMN, TOUCHED_KIND, read_stream, shard_paths
from precompute.partitions.shard_input import read_shard
from precompute.partitions.user_tables import USER_FEATURES_SOURCE
from precompute.scoring.copies import pair_with_digests
from precompute.sources.columns import text_hashes
from precompute.sources.readers import INTERACTIONS_SOURCE

SHARDS = 2
CUT = "1970-01-01T00:30:00Z"
USERS = [f"u{number}" for number in range(9)]
CATALOGUE_IDS = [f"i{number}" for number in range(8)]
NAMELESS = ["x0", "x1"]
"""Items that no catalogue has."""

click = st.tuples(
    st.sampled_from([*USERS, None, ""]), st.sampled_from([*CATALOGUE_IDS, *NAMELESS]), st.integers(1, 1_799)
)
good = st.tuples(st.sampled_from(USERS), st.sampled_from([*CATALOGUE_IDS, *NAMELESS]), st.integers(1, 1_799))
late = st.tuples(st.sampled_from(USERS), st.sampled_from(CATALOGUE_IDS), st.integers(1_800, 1_899))
Clicks = list[tuple[str | None, str, int]]


def item_table(ids: list[str]) -> ItemTable:
    raws = sorted((item_id.encode() for item_id in ids), key=lambda raw: int(hash_ids([raw], 0)[0]))
    offsets = np.cumsum([0, *map(len, raws)]).astype(np.uint64)
    return ItemTable(
        Directory(0, [0], [hash_ids(raws, 0)]), np.frombuffer(b"".join(raws), np.uint8), offsets,
        np.empty((0, 0), np.float32), np.arange(len(raws), dtype=np.int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Night:
    """A partition and where it is."""

    items: ItemTable
    folder: Path
    partition_result: PartitionResult

    def inputs(self) -> dict[str, Any]:
        """All that is known of each user, by name, and the digests of the inputs."""
        inputs_by_user: dict[str, Any] = {}
        for shard in range(SHARDS):
            part = read_shard(self.folder, shard, history_limit=5)
            pairs = pair_with_digests(part, digest_users(part, self.items.directory.hashes()))
            for row, name in enumerate(part.entity_ids.to_pylist()):
                history = part.history_ordinals[part.history_indptr[row] : part.history_indptr[row + 1]]
                inputs_by_user[name] = (
                    shard, int(part.entity_hashes[row]), self.items.ids_of(history.astype(np.uint32)),
                    part.features["age"][row].as_py(), int(pairs["digest"][row]),
                )  # fmt: skip
        return inputs_by_user

    def touched(self) -> set[int]:
        paths = [shard_paths(self.folder, shard, (TOUCHED_KIND,))[0] for shard in range(SHARDS)]
        return {hash_ for path in paths for hash_ in read_stream(path).column(HASH_COLUMN).to_pylist()}


def partitioned(root: Path, name: str, ids: list[str], earlier: EarlierPartition | None = None) -> Night:
    sources = Sources(interactions=("clicks",), user_features="users.parquet")
    config = NightConfig(base=str(root), shards=SHARDS, sources=sources)
    items = item_table(ids)
    job = PartitionJob(NightInput(config, items, parse_time(CUT)), root / name, feature_columns=["age"])
    return Night(items, root / name, job.run(earlier))


def taken_over(night: Night, files: int, items: ItemTable) -> EarlierPartition:
    """What a night takes over of another one, as `earlier_partition` finds it."""
    base_item_ids = night.items.ids_of(np.arange(night.items.count, dtype=np.uint32))
    new_ordinals = np.asarray(items.ordinals_of([item_id.encode() for item_id in base_item_ids]), np.int64)
    lost_item_ids = [
        item_id for item_id, ordinal in zip(base_item_ids, new_ordinals.tolist(), strict=True) if ordinal < 0
    ]
    interaction_counts, unusable = (night.partition_result.interaction_counts, night.partition_result.unusable)
    stayed = len(new_ordinals) == items.count and bool((new_ordinals == np.arange(len(new_ordinals))).all())
    return EarlierPartition(
        folder=night.folder, hash_seed=night.partition_result.hash_seed, interaction_file_count=files,
        new_ordinals=None if stayed else new_ordinals,
        lost_item_hashes=text_hashes(pa.array(lost_item_ids, pa.string()), UNKNOWN_ITEMS_SEED),
        interactions_by_item=interaction_counts.interactions_by_item,
        unknown_item_hashes=interaction_counts.unknown_item_hashes,
        interaction_count=interaction_counts.interaction_count,
        unknown_item_interactions=interaction_counts.unknown_item_interactions,
        unusable={
            name: report for name, report in unusable.items()
            if name.partition(".")[0] in (INTERACTIONS_SOURCE, USER_FEATURES_SOURCE)
        },
    )  # fmt: skip


def write(root: Path, number: int, clicks: Clicks) -> None:
    table = {
        "user": pa.array([row[0] for row in clicks], pa.string()),
        "item": [row[1] for row in clicks],
        "timestamp": [row[2] for row in clicks],
    }
    (root / "clicks").mkdir(exist_ok=True)
    pq.write_table(pa.table(table), root / f"clicks/day-{number}.parquet")


def dump_counts(interaction_counts: Any) -> dict[str, Any]:
    return {
        name: count.tolist() if isinstance(count := getattr(interaction_counts, name), np.ndarray) else count
        for name in ("interaction_count", "unknown_item_interactions", "interactions_by_item", "late_interaction_count")
    }


@settings(max_examples=12, deadline=None)
@given(
    first=st.lists(good, min_size=1, max_size=25),
    more=st.lists(st.lists(click, max_size=12), max_size=2),
    fresh=st.lists(st.lists(st.one_of(click, late), max_size=12), max_size=2),
    withdrawn_items=st.sets(st.sampled_from(CATALOGUE_IDS[1:]), max_size=3), new_item_count=st.integers(0, 2),
)  # fmt: skip
def test_taking_over_gives_what_reading_all_gives(
    first: Clicks, more: list[Clicks], fresh: list[Clicks], withdrawn_items: set[str], new_item_count: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ages = {"user": [*USERS[::2], USERS[0], "only-here", None], "age": [1, 2, None, 4, 5, 6, 7, 8]}
        pq.write_table(pa.table(ages), root / "users.parquet")
        for number, clicks in enumerate([first, *more]):
            write(root, number, clicks)
        base = partitioned(root, "base", CATALOGUE_IDS)
        base_inputs = base.inputs()
        for number, clicks in enumerate(fresh, 1 + len(more)):
            write(root, number, clicks)
        ids = [item_id for item_id in CATALOGUE_IDS if item_id not in withdrawn_items] + [
            f"new{at}" for at in range(new_item_count)
        ]
        full_night = partitioned(root, "whole", ids)

        earlier = taken_over(base, 1 + len(more), full_night.items)
        incremental_night = partitioned(root, "ours", ids, earlier)

        full_inputs = full_night.inputs()
        assert incremental_night.inputs() == full_inputs
        assert dump_counts(incremental_night.partition_result.interaction_counts) == dump_counts(
            full_night.partition_result.interaction_counts
        )
        # An item that left counts as named, whether it was or not, so that all is read if it comes back.
        assert set(full_night.partition_result.interaction_counts.unknown_item_hashes) <= set(
            incremental_night.partition_result.interaction_counts.unknown_item_hashes
        )
        assert (incremental_night.partition_result.user_count, incremental_night.partition_result.hash_seed) == (
            full_night.partition_result.user_count,
            full_night.partition_result.hash_seed,
        )
        assert incremental_night.partition_result.unusable == full_night.partition_result.unusable
        assert (
            incremental_night.partition_result.took_over_earlier and not full_night.partition_result.took_over_earlier
        )
        changed_hashes = {
            user_input[1]
            for user, user_input in full_inputs.items()
            if base_inputs.get(user, [None])[-1] != user_input[-1]
        }
        assert changed_hashes <= incremental_night.touched()
        repeated_night = partitioned(
            root, "again", ids, taken_over(incremental_night, 1 + len(more) + len(fresh), incremental_night.items)
        )
        assert repeated_night.inputs() == full_inputs and repeated_night.touched() == set()
        assert dump_counts(repeated_night.partition_result.interaction_counts) == dump_counts(
            full_night.partition_result.interaction_counts
        ) | {"late_interaction_count": 0}
