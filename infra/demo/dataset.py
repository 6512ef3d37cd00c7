"""Data of the demo: interactions until two cuts, at which nights begin, and the held-out ones for evaluation."""

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
from infra.demo.synthetic import Profiles, World, profiles_of, synthesize
from precompute.config.settings import Sources
from precompute.sources.readers import read_interactions

NEWCOMERS = 400
ARRIVING_EVERY = 25
"""Step between users whose held-out interactions arrive for the second night, for data without times."""

INTERACTIONS = "interactions.parquet"
COLUMNS = ("user", "item", "timestamp")

Lists = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Data of a run: `histories` for the first night, `held_out` of the same users' later items, later `newcomers`.

    The `table` has the columns user, item and timestamp (microseconds since 1970), oldest first.
    """

    name: str
    histories: Lists
    held_out: Lists
    newcomers: Lists
    table: pa.Table
    first_cut: datetime
    second_cut: datetime
    arriving: frozenset[str]
    """Users whose lists the second night changes."""
    profiles: Profiles | None = None
    """Features of users and items, if the demo generated them."""

    def write(self, folder: Path) -> None:
        """Write all files that the nights read."""
        folder.mkdir(parents=True)
        times = self.table["timestamp"].cast(pa.timestamp("us", tz="UTC"))
        pq.write_table(self.table.set_column(2, "timestamp", times), folder / INTERACTIONS)
        for name, rows in ({} if self.profiles is None else self.profiles.tables).items():
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def synthetic(world: World) -> Dataset:
    """Generate data of which the last five days are held out; the first of them arrives for the second night."""
    clicks = synthesize(world)
    users = pa.array(clicks.user_ids).take(clicks.user_rows)
    items = pa.array(clicks.item_ids).take(clicks.item_rows)
    table = pa.table({"user": users, "item": items, "timestamp": clicks.times})
    cut = world.ends_at - timedelta(days=5)
    dataset = _split("synthetic", table, cut, cut + timedelta(days=1))
    return replace(dataset, profiles=profiles_of(clicks))


def user_data(path: Path, *, today: datetime) -> Dataset:
    """Read a team's own data: `train.txt`/`test.txt` lines, or Parquet/CSV interactions; raise SourceError."""
    path = path.resolve()
    lines = {file.name.removesuffix(".gz"): file for file in path.glob("*.txt*")}
    if {"train.txt", "test.txt"} <= lines.keys():
        train, held_out = _read(lines["train.txt"]), _read(lines["test.txt"])
        return _split_untimed(path.name, train, held_out, today)
    table = _read(path)
    times = np.asarray(table["timestamp"])
    if times.any():
        late = np.quantile(times, [0.9, 0.95])
        first, second = (datetime.fromtimestamp(int(us) // 1_000_000 + 1, UTC) for us in late)
        return _split(path.stem, table, first, max(second, first + timedelta(seconds=1)))
    # The last item of each user with at least three is held out.
    later, seen = np.zeros(len(table), np.bool_), Counter(table["user"].to_pylist())
    rows = {user: row for row, user in enumerate(table["user"].to_pylist()) if seen[user] >= 3}
    later[list(rows.values())] = True
    return _split_untimed(path.stem, table.filter(~later), table.filter(later), today)


def _read(path: Path) -> pa.Table:
    """Read all rows, oldest first, without a user's repeated interactions with an item."""
    batches = read_interactions(Sources(interactions=(str(path),)), Path("/"))
    rows = [(batch.users.texts(), batch.items.texts(), pa.array(batch.times)) for batch in batches]
    table = pa.concat_tables([pa.table(list(columns), names=COLUMNS) for columns in rows])
    table = table.take(np.argsort(table["timestamp"], kind="stable"))
    numbered = table.append_column("row", pa.array(np.arange(len(table))))
    first_rows = numbered.group_by(["user", "item"]).aggregate([("row", "min")])["row_min"]
    return table.take(np.sort(first_rows))


def _split_untimed(name: str, train: pa.Table, held_out: pa.Table, today: datetime) -> Dataset:
    """Give the held-out interactions times after the first cut, those of a few users before the second."""
    first = today - timedelta(days=1)
    arriving = pc.unique(held_out["user"])[::ARRIVING_EVERY]
    hours = np.where(pc.is_in(held_out["user"], arriving), 0, 24)
    hours = np.concatenate([np.full(len(train), -1), hours])
    times = int(first.timestamp() * 1_000_000) + hours * 3_600_000_000
    table = pa.concat_tables([train, held_out]).set_column(2, "timestamp", pa.array(times))
    return _split(name, table, first, today)


def _split(name: str, table: pa.Table, first: datetime, second: datetime) -> Dataset:
    times = np.asarray(table["timestamp"])
    first_us, second_us = (int(cut.timestamp() * 1_000_000) for cut in (first, second))
    histories = _items_by_user(table.filter(times < first_us))
    if not histories:
        raise SourceError(f"{name}: nothing is left to train on once the newest part is held out")
    later = _items_by_user(table.filter(times >= first_us))
    arriving = table.filter((times >= first_us) & (times < second_us))["user"].to_pylist()
    held_out = {user: items for user, items in later.items() if user in histories}
    newcomers = {user: items for user, items in later.items() if user not in histories}
    if not newcomers:  # what known users do later stands for people never seen before
        users = sorted(held_out)[:: max(1, len(held_out) // NEWCOMERS)]
        newcomers = {f"fresh-{number:04d}": held_out[user] for number, user in enumerate(users)}
    few = {user: newcomers[user][:20] for user in sorted(newcomers)[:NEWCOMERS]}
    return Dataset(name, histories, held_out, few, table, first, second, frozenset(arriving))


def _items_by_user(table: pa.Table) -> dict[str, tuple[str, ...]]:
    lists = table.group_by("user", use_threads=False).aggregate([("item", "list")])
    users, items = lists["user"].to_pylist(), lists["item_list"].to_pylist()
    return dict(zip(users, map(tuple, items), strict=True))
