"""Data of the demo: interactions until the cuts of two nights, and held-out interactions for evaluation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache.errors import SourceError
from infra.demo.synthetic import Profiles, WorldSettings, make_profiles, synthesize
from precompute.config.settings import Sources
from precompute.sources.readers import read_interactions

NEWCOMERS_MAX = 400
ARRIVING_USER_STEP = 25
"""For data without times: the held-out interactions of every 25th user arrive before the second night."""

INTERACTIONS_FILE = "interactions.parquet"
COLUMN_NAMES = ("user", "item", "timestamp")

ItemsByUser = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Data of a run: `histories` until the first cut, `held_out` later items of the same users, and `newcomers`.

    `newcomers` are users without a history, with their later items. The `table` has the columns user, item and
    timestamp (microseconds since 1970), oldest first.
    """

    dataset_name: str
    histories: ItemsByUser
    held_out: ItemsByUser
    newcomers: ItemsByUser
    table: pa.Table
    first_cut: datetime
    second_cut: datetime
    arriving_users: frozenset[str]
    """Users with interactions between the two cuts, whose lists the second night changes."""
    profiles: Profiles | None = None
    """Features of users and items, if the demo generated them."""

    def write(self, folder: Path) -> None:
        """Write all files that the nights read."""
        folder.mkdir(parents=True)
        times = self.table["timestamp"].cast(pa.timestamp("us", tz="UTC"))
        pq.write_table(self.table.set_column(2, "timestamp", times), folder / INTERACTIONS_FILE)
        for table_name, table_rows in ({} if self.profiles is None else self.profiles.tables).items():
            pq.write_table(pa.Table.from_pylist(table_rows), folder / f"{table_name}.parquet")


def make_synthetic_data(world: WorldSettings) -> Dataset:
    """Generate data whose last five days are held out; the second night reads the first of these days."""
    clicks = synthesize(world)
    user_column = pa.array(clicks.user_ids).take(clicks.user_rows)
    item_column = pa.array(clicks.item_ids).take(clicks.item_rows)
    table = pa.table({"user": user_column, "item": item_column, "timestamp": clicks.times_us})
    first_cut = world.last_click_at - timedelta(days=5)
    dataset = _split_at_cuts("synthetic", table, first_cut, first_cut + timedelta(days=1))
    return replace(dataset, profiles=make_profiles(clicks))


def read_user_data(path: Path, *, today: datetime) -> Dataset:
    """Read a team's own data: `train.txt`/`test.txt` lines, or Parquet/CSV interactions; raise SourceError."""
    path = path.resolve()
    text_file_by_name = {file.name.removesuffix(".gz"): file for file in path.glob("*.txt*")}
    if {"train.txt", "test.txt"} <= text_file_by_name.keys():
        train, held_out = (_read_interactions(text_file_by_name[name]) for name in ("train.txt", "test.txt"))
        return _split_untimed(path.name, train, held_out, today)
    table = _read_interactions(path)
    times = np.asarray(table["timestamp"])
    if times.any():
        late_times = np.quantile(times, [0.9, 0.95])
        first_cut, second_cut = (datetime.fromtimestamp(int(cut_us) // 1_000_000 + 1, UTC) for cut_us in late_times)
        return _split_at_cuts(path.stem, table, first_cut, max(second_cut, first_cut + timedelta(seconds=1)))
    # Hold out the last item of each user with at least three interactions.
    held_out_mask, click_count_by_user = (np.zeros(len(table), np.bool_), Counter(table["user"].to_pylist()))
    last_row_by_user = {user: row for row, user in enumerate(table["user"].to_pylist())}
    held_out_mask[[row for user, row in last_row_by_user.items() if click_count_by_user[user] >= 3]] = True
    return _split_untimed(path.stem, table.filter(~held_out_mask), table.filter(held_out_mask), today)


def _read_interactions(path: Path) -> pa.Table:
    """Read all rows, oldest first, with only the first interaction of a user with an item."""
    batches = read_interactions(Sources(interactions=(str(path),)), Path("/"))
    batch_columns = [
        (batch.user_ids.row_texts(), batch.item_ids.row_texts(), pa.array(batch.times_us)) for batch in batches
    ]
    table = pa.concat_tables([pa.table(list(columns), names=COLUMN_NAMES) for columns in batch_columns])
    table = table.take(np.argsort(table["timestamp"], kind="stable"))
    table_with_rows = table.append_column("row", pa.array(np.arange(len(table))))
    first_rows = table_with_rows.group_by(["user", "item"]).aggregate([("row", "min")])["row_min"]
    return table.take(np.sort(first_rows))


def _split_untimed(name: str, train_table: pa.Table, held_out_table: pa.Table, today: datetime) -> Dataset:
    """Set times: held-out interactions come after the first cut, those of every 25th user before the second cut."""
    first_cut = today - timedelta(days=1)
    arriving_users = pc.unique(held_out_table["user"])[::ARRIVING_USER_STEP]
    hours_after_first_cut = np.where(pc.is_in(held_out_table["user"], arriving_users), 0, 24)
    hours_after_first_cut = np.concatenate([np.full(len(train_table), -1), hours_after_first_cut])
    times = int(first_cut.timestamp() * 1_000_000) + hours_after_first_cut * 3_600_000_000
    table = pa.concat_tables([train_table, held_out_table]).set_column(2, "timestamp", pa.array(times))
    return _split_at_cuts(name, table, first_cut, today)


def _split_at_cuts(name: str, table: pa.Table, first_cut: datetime, second_cut: datetime) -> Dataset:
    times = np.asarray(table["timestamp"])
    first_us, second_us = (int(cut.timestamp() * 1_000_000) for cut in (first_cut, second_cut))
    histories = _items_by_user(table.filter(times < first_us))
    if not histories:
        raise SourceError(f"{name}: no interactions are left for training once the newest ones are held out")
    later_items_by_user = _items_by_user(table.filter(times >= first_us))
    arriving_users = table.filter((times >= first_us) & (times < second_us))["user"].to_pylist()
    held_out_by_user = {user: items for user, items in later_items_by_user.items() if user in histories}
    newcomers = {user: items for user, items in later_items_by_user.items() if user not in histories}
    if not newcomers:  # let the later items of known users represent newcomers
        users = sorted(held_out_by_user)[:: max(1, len(held_out_by_user) // NEWCOMERS_MAX)]
        newcomers = {f"fresh-{newcomer_index:04d}": held_out_by_user[user] for newcomer_index, user in enumerate(users)}
    sampled_newcomers = {user: newcomers[user][:20] for user in sorted(newcomers)[:NEWCOMERS_MAX]}
    return Dataset(
        name, histories, held_out_by_user, sampled_newcomers, table, first_cut, second_cut, frozenset(arriving_users)
    )


def _items_by_user(table: pa.Table) -> dict[str, tuple[str, ...]]:
    item_list_table = table.group_by("user", use_threads=False).aggregate([("item", "list")])
    users, items = item_list_table["user"].to_pylist(), item_list_table["item_list"].to_pylist()
    return dict(zip(users, map(tuple, items), strict=True))
