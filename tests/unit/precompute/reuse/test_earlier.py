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
from precompute.partitions.earlier import UNKNOWN_SEED, Earlier
from precompute.partitions.partition import Partitioned, partition
from precompute.partitions.shard_files import HASH, TOUCHED, read_stream, shard_paths
from precompute.partitions.shard_input import read_shard
from precompute.partitions.user_tables import USER_ROWS
from precompute.reuse.copied import paired
from precompute.reuse.digests import of_users
from precompute.sources.columns import text_hashes
from precompute.sources.formats import INTERACTIONS

SHARDS = 2
CUT = "1970-01-01T00:30:00Z"
USERS = [f"u{number}" for number in range(9)]
KNOWN = [f"i{number}" for number in range(8)]
NAMELESS = ["x0", "x1"]
"""Items that no catalogue has."""

click = st.tuples(
    st.sampled_from([*USERS, None, ""]), st.sampled_from([*KNOWN, *NAMELESS]), st.integers(1, 1_799)
)
good = st.tuples(
    st.sampled_from(USERS), st.sampled_from([*KNOWN, *NAMELESS]), st.integers(1, 1_799)
)
late = st.tuples(st.sampled_from(USERS), st.sampled_from(KNOWN), st.integers(1_800, 1_899))
Clicks = list[tuple[str | None, str, int]]


def item_table(ids: list[str]) -> ItemTable:
    raws = sorted((each.encode() for each in ids), key=lambda raw: int(hash_ids([raw], 0)[0]))
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
    found: Partitioned

    def inputs(self) -> dict[str, Any]:
        """All that is known of each user, by name, and the digests of the inputs."""
        told: dict[str, Any] = {}
        for shard in range(SHARDS):
            part = read_shard(self.folder, shard, history_limit=5)
            pairs = paired(part, of_users(part, self.items.directory.hashes()))
            for row, name in enumerate(part.ids.to_pylist()):
                history = part.ordinals[part.indptr[row] : part.indptr[row + 1]]
                told[name] = (
                    shard, int(part.hashes[row]), self.items.ids_of(history.astype(np.uint32)),
                    part.features["age"][row].as_py(), int(pairs["digest"][row]),
                )  # fmt: skip
        return told

    def touched(self) -> set[int]:
        paths = [shard_paths(self.folder, shard, (TOUCHED,))[0] for shard in range(SHARDS)]
        return {hash_ for path in paths for hash_ in read_stream(path).column(HASH).to_pylist()}


def partitioned(root: Path, name: str, ids: list[str], earlier: Earlier | None = None) -> Night:
    sources = Sources(interactions=("clicks",), user_features="users.parquet")
    config = NightConfig(base=str(root), shards=SHARDS, sources=sources)
    items = item_table(ids)
    found = partition(
        config, items, root / name, before=parse_time(CUT), feature_columns=["age"], earlier=earlier
    )
    return Night(items, root / name, found)


def taken_over(night: Night, files: int, items: ItemTable) -> Earlier:
    """What a night takes over of another one, as `earlier_partition` finds it."""
    before = night.items.ids_of(np.arange(night.items.count, dtype=np.uint32))
    places = np.asarray(items.ordinals_of([each.encode() for each in before]), np.int64)
    gone = [each for each, place in zip(before, places.tolist(), strict=True) if place < 0]
    counted, unusable = night.found.counted, night.found.unusable
    stayed = len(places) == items.count and bool((places == np.arange(len(places))).all())
    return Earlier(
        folder=night.folder, seed=night.found.seed, files=files, places=None if stayed else places,
        gone=text_hashes(pa.array(gone, pa.string()), UNKNOWN_SEED), popularity=counted.popularity,
        unknown=counted.unknown, interactions=counted.interactions,
        unknown_items=counted.unknown_items,
        unusable={
            name: each for name, each in unusable.items()
            if name.partition(".")[0] in (INTERACTIONS, USER_ROWS)
        },
    )  # fmt: skip


def write(root: Path, number: int, clicks: Clicks) -> None:
    table = {
        "user": pa.array([each[0] for each in clicks], pa.string()),
        "item": [each[1] for each in clicks],
        "timestamp": [each[2] for each in clicks],
    }
    (root / "clicks").mkdir(exist_ok=True)
    pq.write_table(pa.table(table), root / f"clicks/day-{number}.parquet")


def shown(counted: Any) -> dict[str, Any]:
    return {
        name: each.tolist() if isinstance(each := getattr(counted, name), np.ndarray) else each
        for name in ("interactions", "unknown_items", "popularity", "late")
    }


@settings(max_examples=12, deadline=None)
@given(
    first=st.lists(good, min_size=1, max_size=25),
    more=st.lists(st.lists(click, max_size=12), max_size=2),
    fresh=st.lists(st.lists(st.one_of(click, late), max_size=12), max_size=2),
    gone=st.sets(st.sampled_from(KNOWN[1:]), max_size=3), comes=st.integers(0, 2),
)  # fmt: skip
def test_taking_over_gives_what_reading_all_gives(
    first: Clicks, more: list[Clicks], fresh: list[Clicks], gone: set[str], comes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ages = {
            "user": [*USERS[::2], USERS[0], "only-here", None],
            "age": [1, 2, None, 4, 5, 6, 7, 8],
        }
        pq.write_table(pa.table(ages), root / "users.parquet")
        for number, clicks in enumerate([first, *more]):
            write(root, number, clicks)
        base = partitioned(root, "base", KNOWN)
        before = base.inputs()
        for number, clicks in enumerate(fresh, 1 + len(more)):
            write(root, number, clicks)
        ids = [each for each in KNOWN if each not in gone] + [f"new{at}" for at in range(comes)]
        whole = partitioned(root, "whole", ids)

        earlier = taken_over(base, 1 + len(more), whole.items)
        ours = partitioned(root, "ours", ids, earlier)

        now = whole.inputs()
        assert ours.inputs() == now
        assert shown(ours.found.counted) == shown(whole.found.counted)
        # What left counts as named, whether it was or not: should it come back, all is read.
        assert set(whole.found.counted.unknown) <= set(ours.found.counted.unknown)
        assert (ours.found.users, ours.found.seed) == (whole.found.users, whole.found.seed)
        assert ours.found.unusable == whole.found.unusable
        assert ours.found.took_over and not whole.found.took_over
        changed = {
            each[1] for user, each in now.items() if before.get(user, [None])[-1] != each[-1]
        }
        assert changed <= ours.touched()
        again = partitioned(
            root, "again", ids, taken_over(ours, 1 + len(more) + len(fresh), ours.items)
        )
        assert again.inputs() == now and again.touched() == set()
        assert shown(again.found.counted) == shown(whole.found.counted) | {"late": 0}
