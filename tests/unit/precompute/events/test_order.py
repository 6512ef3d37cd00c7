"""Events beside a team's own rows in a partition: in the order of their times and positions, whoever adds them."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.format.stream_position import Position
from precompute.config.settings import NightConfig, Sources, parse_time
from precompute.events.files import encode_events, read_event_interactions
from precompute.partitions.digests import digest_users
from precompute.partitions.night_input import FurtherInput, NightInput
from precompute.partitions.partition import EarlierPartition, PartitionJob, PartitionResult
from precompute.partitions.shard_input import read_shard
from tests.unit.precompute.reuse.test_earlier import item_table

SHARDS = 2
CUT = "1970-01-01T00:00:08Z"
"""Some of the events happened after it."""
USERS, ITEMS = [f"u{number}" for number in range(4)], [f"i{number}" for number in range(4)]

click = st.tuples(st.sampled_from(USERS), st.sampled_from([*ITEMS, "x"]), st.integers(1, 7), st.just(1.0))
event = st.tuples(
    st.sampled_from(USERS), st.sampled_from([*ITEMS, "x"]), st.integers(1, 12),
    st.sampled_from([1.0, 0.0]),
)  # fmt: skip
Rows = list[tuple[str, str, int, float]]
Files = st.lists(st.lists(event, max_size=10), max_size=3)


class Sandbox:
    """Files of a team and of events, and partitions over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.items = item_table(ITEMS)
        self.clicks: list[Rows] = []
        self.events: list[Rows] = []
        (root / "clicks").mkdir()

    def add(self, clicks: list[Rows], events: list[Rows]) -> None:
        for rows in clicks:
            columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 4
            table = {
                "user": pa.array(columns[0], pa.string()), "item": pa.array(columns[1], pa.string()),
                "timestamp": pa.array(columns[2], pa.int64()),
            }  # fmt: skip
            pq.write_table(pa.table(table), self.root / f"clicks/{len(self.clicks)}.parquet")
            self.clicks.append(rows)
        for rows in events:
            first = 1 + sum(map(len, self.events))
            positioned_events = [
                (
                    Position(0, first + number),
                    Event(f"e{first + number}", at * 1_000_000, user.encode(), item.encode(), weight=weight),
                )
                for number, (user, item, at, weight) in enumerate(rows)
            ]  # fmt: skip
            path = self.root / f"{len(self.events)}.events"
            path.write_bytes(encode_events(positioned_events, Position(0, first + len(rows))))
            self.events.append(rows)

    def partition(self, name: str, earlier: EarlierPartition | None = None) -> PartitionResult:
        sources = Sources(interactions=("clicks",))
        config = NightConfig(base=str(self.root), shards=SHARDS, sources=sources, events=EventsConfig(enabled=True))
        files = [self.root / f"{number}.events" for number in range(len(self.events))]
        further = FurtherInput(interactions=partial(read_event_interactions, files))
        night = NightInput(config, self.items, parse_time(CUT), further=further)
        return PartitionJob(night, self.root / name).run(earlier)

    def inputs(self, name: str) -> dict[str, Any]:
        """Items and times of each user, and the digest of both."""
        inputs_by_user: dict[str, Any] = {}
        for shard in range(SHARDS):
            part = read_shard(self.root / name, shard, history_limit=5)
            assert part.history_times is not None
            for row, user in enumerate(part.entity_ids.to_pylist()):
                span = slice(part.history_indptr[row], part.history_indptr[row + 1])
                items = self.items.ids_of(part.history_ordinals[span].astype("u4"))
                digest = digest_users(part, self.items.directory.hashes())[row]
                inputs_by_user[user] = (list(zip(items, part.history_times[span].tolist(), strict=True)), int(digest))
        return inputs_by_user

    def expected(self) -> dict[str, list[tuple[str, int]]]:
        """Items of each user by the words of the documentation."""
        rows = [
            (at, is_event, user, item)
            for is_event, files in enumerate((self.clicks, self.events))
            for row in files for user, item, at, weight in row if weight > 0
        ]  # fmt: skip
        # An event with an unknown item adds no user.
        history_by_user: dict[str, dict[str, int]] = {
            user: {} for _, is_event, user, item in rows if item in ITEMS or not is_event
        }
        for at, _, user, item in sorted(rows, key=lambda row: row[:2]):
            if item in ITEMS:
                history_by_user[user].pop(item, None)
                history_by_user[user][item] = at * 1_000_000
        return {user: list(history.items()) for user, history in history_by_user.items()}


def without_remarks(report: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts of a report of unusable rows; rows that repeat each other are looked for in the files that are read."""
    return {
        source: {name: count for name, count in counts.items() if name != "remarks"}
        for source, counts in report.items()
    }


@settings(max_examples=30, deadline=None)
@given(
    st.lists(click, min_size=1, max_size=12), Files, st.lists(st.lists(click, max_size=8), max_size=2),
    Files,
)  # fmt: skip
def test_events_stand_at_their_times_whatever_was_taken_over(
    first: Rows, events: list[Rows], fresh: list[Rows], newer: list[Rows]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox(Path(folder))
        box.add([first], events)
        base = box.partition("base")
        assert {user: history for user, (history, _) in box.inputs("base").items()} == box.expected()
        interaction_counts = base.interaction_counts
        assert interaction_counts.late_interaction_count == 0
        earlier = EarlierPartition(
            folder=box.root / "base", hash_seed=base.hash_seed, interaction_file_count=1, new_ordinals=None,
            lost_item_hashes=interaction_counts.unknown_item_hashes[:0],
            interactions_by_item=interaction_counts.interactions_by_item,
            unknown_item_hashes=interaction_counts.unknown_item_hashes,
            interaction_count=interaction_counts.interaction_count,
            unknown_item_interactions=interaction_counts.unknown_item_interactions, unusable=base.unusable,
            event_file_count=len(events),
        )  # fmt: skip

        box.add(fresh, newer)
        full_partition, incremental_partition = (box.partition("whole"), box.partition("ours", earlier))

        assert {user: history for user, (history, _) in box.inputs("whole").items()} == box.expected()
        assert box.inputs("ours") == box.inputs("whole")
        assert (
            incremental_partition.interaction_counts.interaction_count
            == full_partition.interaction_counts.interaction_count
        )
        assert (
            incremental_partition.interaction_counts.interactions_by_item.tolist()
            == full_partition.interaction_counts.interactions_by_item.tolist()
        )
        assert without_remarks(incremental_partition.unusable) == without_remarks(full_partition.unusable)
