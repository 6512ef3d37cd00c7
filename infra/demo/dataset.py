"""Data of the demo: a night's interactions, the next day's, and the held-out ones for evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.errors import SourceError
from infra.demo.synthetic import (
    ITEM_FEATURES,
    USER_FEATURES,
    Profiles,
    World,
    profiles_of,
    synthesize,
)
from precompute.config.settings import Sources
from precompute.sources.readers import read_interactions

NEWCOMERS = 400
DRIFT = 0.3
HELD_OUT_SHARE = 0.1
ARRIVING_EVERY = 25
"""Step between users whose held-out interactions arrive for the second night, for data without times."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Interactions, oldest first: Arrow strings, and int64 microseconds since 1970 (0 = not known)."""

    users: Any
    items: Any
    times: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.times)

    def where(self, keep: NDArray[np.bool_]) -> Self:
        """Return the interactions of the rows that `keep` marks."""
        mask = pa.array(keep)
        return replace(
            self,
            users=self.users.filter(mask),
            items=self.items.filter(mask),
            times=self.times[keep],
        )

    def by_user(self) -> dict[str, tuple[str, ...]]:
        """Return the items of each user, in order."""
        if not len(self):
            return {}
        coded = pc.dictionary_encode(self.users)
        rows = np.asarray(coded.indices, np.int64)
        order = np.argsort(rows, kind="stable")
        ends = np.cumsum(np.bincount(rows)).tolist()
        items = self.items.take(pa.array(order)).to_pylist()
        starts = [0, *ends[:-1]]
        return {
            user: tuple(items[start:end])
            for user, start, end in zip(coded.dictionary.to_pylist(), starts, ends, strict=True)
        }


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Data of a run: `histories` for the first night, `held_out` of the same users' later items, later `newcomers`."""

    name: str
    first_cut: datetime
    second_cut: datetime
    initial_pairs: Pairs
    arriving: Pairs
    histories: Mapping[str, tuple[str, ...]]
    held_out: Mapping[str, tuple[str, ...]]
    newcomers: Mapping[str, tuple[str, ...]]
    original: Path | None = None
    """File that `initial_pairs` was read from, if the night can read it unchanged."""
    item_features: Path | None = None
    profiles: Profiles | None = None
    """Features of users and items, if the demo generated them."""

    def write_first(self, folder: Path) -> None:
        """Write the first night's files to `folder`; the user's own files are linked, not copied."""
        (folder / "interactions").mkdir(parents=True)
        if self.original is not None:
            link = folder / "interactions" / f"day-1{''.join(self.original.suffixes)}"
            link.symlink_to(self.original)
        else:
            write_parquet(self.initial_pairs, folder / "interactions" / "day-1.parquet")
        if self.item_features is not None:
            (folder / ITEM_FEATURES).symlink_to(self.item_features)
        elif self.profiles is not None:
            self.profiles.write(folder)

    def write_second(self, folder: Path) -> None:
        """Write the next day's interactions as a second file."""
        write_parquet(self.arriving, folder / "interactions" / "day-2.parquet")

    @property
    def feature_tables(self) -> Mapping[str, str]:
        """Names of the files of features that `write_first` writes, by setting."""
        if self.profiles is not None:
            return {"user_features": USER_FEATURES, "item_features": ITEM_FEATURES}
        return {} if self.item_features is None else {"item_features": ITEM_FEATURES}


def write_parquet(pairs: Pairs, path: Path) -> None:
    """Write `user, item[, timestamp]` as Parquet, atomically."""
    columns = {"user": pairs.users, "item": pairs.items}
    if len(pairs) and pairs.times.any():
        columns["timestamp"] = pa.array(pairs.times, pa.timestamp("us", tz="UTC"))
    part_path = path.with_suffix(".part")
    pq.write_table(pa.table(columns), part_path)
    part_path.replace(path)


def synthetic(world: World) -> Dataset:
    """Generate data of which the last five days are held out; the first of them arrives for the second night."""
    clicks = synthesize(world)
    users, items = np.array(clicks.user_ids, object), np.array(clicks.item_ids, object)
    pairs = Pairs(
        pa.array(users[clicks.user_rows], pa.string()),
        pa.array(items[clicks.item_rows], pa.string()),
        clicks.times,
    )
    cut = world.ends_at - timedelta(days=5)
    dataset = _split_by_time("synthetic", pairs, cut, cut + timedelta(days=1))
    return replace(dataset, profiles=profiles_of(clicks, world.seed))


def user_data(path: Path, *, current_time: datetime) -> Dataset:
    """Read a team's own data: `train.txt`/`test.txt` lines, or Parquet/CSV interactions; raise SourceError."""
    path = path.resolve()
    if path.is_dir() and (train := _named(path, "train.txt")) is not None:
        train_pairs = _read([train])
        test = _named(path, "test.txt")
        if test is not None:
            held_out = _read([test])
            dataset = _split_by_hand(path.name, train_pairs, held_out, current_time)
            return replace(dataset, original=train)
        return _hold_out_at_random(path.name, train_pairs, current_time)
    files = [path] if path.is_file() else _interaction_files(path)
    pairs = _read(files)
    if pairs.times.any():
        order = np.argsort(pairs.times, kind="stable")
        pairs = Pairs(
            pairs.users.take(pa.array(order)), pairs.items.take(pa.array(order)), pairs.times[order]
        )
        late = np.quantile(pairs.times, [1 - HELD_OUT_SHARE, 1 - HELD_OUT_SHARE / 2])
        first, second = (
            datetime.fromtimestamp(int(cut_us) // 1_000_000 + 1, UTC) for cut_us in late
        )
        dataset = _split_by_time(path.stem, pairs, first, max(second, first + timedelta(seconds=1)))
    else:
        dataset = _hold_out_at_random(path.stem, pairs, current_time)
    features = path / ITEM_FEATURES if path.is_dir() else None
    return replace(dataset, item_features=features if features and features.is_file() else None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: its data and sizes."""

    data: Path | None
    state: Path
    quick: bool
    serve: bool

    @property
    def requests(self) -> int:
        """Number of requests of the measured replay."""
        return 3_000 if self.quick else 10_000

    @property
    def world(self) -> World:
        """Parameters of the synthetic data."""
        today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.quick:
            return World(users=3_000, items=1_000, ends_at=today, drift=DRIFT)
        return World(ends_at=today, drift=DRIFT)

    def dataset(self) -> Dataset:
        """Return the user's data, else synthetic data."""
        if self.data is None:
            return synthetic(self.world)
        return user_data(self.data, current_time=datetime.now(UTC))


def _named(folder: Path, name: str) -> Path | None:
    return next(
        (
            candidate_path
            for candidate_path in (folder / name, folder / f"{name}.gz")
            if candidate_path.is_file()
        ),
        None,
    )


def _interaction_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise SourceError(f"{folder} is neither a file nor a folder")
    endings = (".parquet", ".pq", ".csv", ".csv.gz", ".txt", ".txt.gz")
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.name.endswith(endings) and "features" not in path.name
    ]
    if not files:
        raise SourceError(f"{folder} holds no interactions: {', '.join(endings)}")
    return files


def _read(files: Sequence[Path]) -> Pairs:
    """Read all rows without a user's repeated interactions with an item."""
    sources = Sources(interactions=tuple(str(file) for file in files))
    batches = list(read_interactions(sources, Path("/")))
    if not batches:
        raise SourceError(f"{files[0]} holds no interaction")
    users = pa.chunked_array([batch.users.texts() for batch in batches]).combine_chunks()
    items = pa.chunked_array([batch.items.texts() for batch in batches]).combine_chunks()
    pairs = Pairs(users, items, np.concatenate([batch.times for batch in batches]))
    return pairs.where(_first_occurrence_mask(pairs))


def _first_occurrence_mask(pairs: Pairs) -> NDArray[np.bool_]:
    coded_users, coded_items = (
        pc.dictionary_encode(id_column) for id_column in (pairs.users, pairs.items)
    )
    rows = np.asarray(coded_users.indices, np.int64) * len(coded_items.dictionary)
    order = np.argsort(pairs.times, kind="stable")
    _, first = np.unique(
        (rows + np.asarray(coded_items.indices, np.int64))[order], return_index=True
    )
    keep = np.zeros(len(pairs), np.bool_)
    keep[order[first]] = True
    return keep


def _split_by_time(name: str, pairs: Pairs, first: datetime, second: datetime) -> Dataset:
    cuts = [int(cut_time.timestamp() * 1_000_000) for cut_time in (first, second)]
    train_pairs, later = pairs.where(pairs.times < cuts[0]), pairs.where(pairs.times >= cuts[0])
    arriving = later.where(later.times < cuts[1])
    return _dataset(name, first, second, train_pairs, arriving, later)


def _split_by_hand(
    name: str, train_pairs: Pairs, held_out: Pairs, current_time: datetime
) -> Dataset:
    users = pc.dictionary_encode(held_out.users)
    arriving = held_out.where(np.asarray(users.indices, np.int64) % ARRIVING_EVERY == 0)
    first = current_time.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    return _dataset(name, first, first + timedelta(days=1), train_pairs, arriving, held_out)


def _hold_out_at_random(name: str, pairs: Pairs, current_time: datetime) -> Dataset:
    """Hold out one item of each user with at least three, chosen at random with a fixed seed."""
    rows = np.asarray(pc.dictionary_encode(pairs.users).indices, np.int64)
    order = np.lexsort((np.random.default_rng(0).random(len(rows)), rows))
    counts = np.bincount(rows)
    last = np.cumsum(counts) - 1
    keep = np.ones(len(rows), np.bool_)
    keep[order[last[counts >= 3]]] = False
    return _split_by_hand(name, pairs.where(keep), pairs.where(~keep), current_time)


def _dataset(
    name: str, first: datetime, second: datetime, train_pairs: Pairs, arriving: Pairs, later: Pairs
) -> Dataset:
    if not len(train_pairs):
        raise SourceError(f"{name}: nothing is left to train on once the newest part is held out")
    histories, afterwards = train_pairs.by_user(), later.by_user()
    held_out = {user: items for user, items in afterwards.items() if user in histories}
    fresh = {user: items[:20] for user, items in afterwards.items() if user not in histories}
    if not fresh:  # nobody joined: what known users do later stands for people never seen before
        sampled_users = sorted(held_out)[:: max(1, len(held_out) // NEWCOMERS)]
        fresh = {
            f"fresh-{number:04d}": held_out[user][:20] for number, user in enumerate(sampled_users)
        }
    newcomers = dict(sorted(fresh.items())[:NEWCOMERS])
    return Dataset(name, first, second, train_pairs, arriving, histories, held_out, newcomers)
