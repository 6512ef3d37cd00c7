"""A small world to recommend in: users with a few tastes, items of Zipf popularity, their clicks and features."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Features = Mapping[str, str | float]
"""Features of one user or item by column, as a caller sends them."""

CATEGORIES = (
    "bags", "books", "coats", "coffee", "garden", "games", "knits", "lamps", "music", "outdoor",
    "paper", "shoes", "tea", "tools", "toys", "travel", "watches", "wool", "wood", "workwear",
)  # fmt: skip

COUNTRIES = ("AT", "BR", "CA", "DE", "ES", "FR", "IN", "JP", "MX", "NL", "PL", "SE", "US", "ZA")
USER_FEATURES, ITEM_FEATURES = "user_features.parquet", "item_features.parquet"
DAYS = 60.0
GROUPS_PER_CATEGORY = 5

TASTES = (0.6, 0.3, 0.1)
"""Share of a user's clicks that goes to the first, second and third group of items that the user likes."""

AT_HOME_SHARE = 0.7
"""Share of users who live where their favourite category is bought most."""

UNSEEN_SHARE = 0.01
"""Items in no interaction yet, as a share of the others: the catalogue has their features."""


@dataclass(frozen=True, slots=True)
class World:
    """Size and time of the synthetic world: clicks end at `ends_at`."""

    users: int = 20_000
    items: int = 5_000
    seed: int = 0
    ends_at: datetime = datetime(2026, 1, 31, tzinfo=UTC)
    newcomers: float = 0.03
    """Share of users whose first click falls into the last five days."""
    drift: float = 0.0
    """Share (0 to 1) of the order of a user's clicks that follows when items are in fashion; the rest is chance."""


@dataclass(frozen=True, slots=True, eq=False)
class Clicks:
    """Distinct (user, item) pairs in order of time: rows into the ids, times int64 microseconds since 1970."""

    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    categories: tuple[str, ...]
    user_rows: NDArray[np.int64]
    item_rows: NDArray[np.int64]
    times: NDArray[np.int64]


def synthesize(world: World) -> Clicks:
    """Clicks of a synthetic world; the same world gives the same ones, bit for bit."""
    rng = np.random.default_rng(world.seed)
    groups = max(2, min(len(CATEGORIES) * GROUPS_PER_CATEGORY, world.items // 20))
    group_of_item = np.sort(rng.integers(groups, size=world.items))
    popularity = rng.permutation(1.0 / np.arange(1, world.items + 1) ** 0.9)
    clicks_of_user = 8 + rng.lognormal(2.7, 0.8, world.users).astype(np.int64).clip(1, 400)
    users = np.repeat(np.arange(world.users), clicks_of_user)
    items = _choose_items(rng, users, group_of_item, popularity, groups)
    times = _click_times(rng, world, users)
    if world.drift:
        items, times = _in_fashion(world, users, items, times)
    order = np.argsort(times, kind="stable")
    users, items, times = users[order], items[order], times[order]
    # A second click on the same item says nothing new; the first one counts.
    _, first = np.unique(users * world.items + items, return_index=True)
    first_clicks = np.sort(first)
    names = [CATEGORIES[group // GROUPS_PER_CATEGORY % len(CATEGORIES)] for group in group_of_item]
    return Clicks(
        tuple(map(_user_id, range(world.users))),
        tuple(map(_item_id, range(world.items))),
        tuple(names),
        users[first_clicks],
        items[first_clicks],
        times[first_clicks],
    )


def _choose_items(
    rng: np.random.Generator,
    users: NDArray[np.int64],
    group_of_item: NDArray[np.int64],
    popularity: NDArray[np.float64],
    groups: int,
) -> NDArray[np.int64]:
    """Draw an item per click: a group by the user's taste, then an item of it by popularity."""
    # Groups are popular or not as well: without it, distinct clicks alone would flatten the skew.
    liked = rng.permutation(1.0 / (3.0 + np.arange(groups)) ** 0.8)
    tastes = rng.choice(groups, (int(users[-1]) + 1, len(TASTES)), p=liked / liked.sum())
    group = tastes[users, rng.choice(len(TASTES), len(users), p=TASTES)]
    # Items lie sorted by group, so that a group is one stretch of the cumulated popularity.
    ends = np.concatenate([[0.0], np.cumsum(popularity)])
    starts = np.searchsorted(group_of_item, np.arange(groups + 1))
    low, high = ends[starts[group]], ends[starts[group + 1]]
    drawn = np.searchsorted(ends, low + (high - low) * rng.random(len(users)), side="right") - 1
    # A group without an item sends its clicks to its neighbour.
    item_rows: NDArray[np.int64] = np.clip(drawn, 0, len(group_of_item) - 1)
    return item_rows


def _click_times(
    rng: np.random.Generator, world: World, users: NDArray[np.int64]
) -> NDArray[np.int64]:
    joined = rng.random(world.users) * 0.7 * DAYS
    new = rng.random(world.users) < world.newcomers
    joined[new] = DAYS - 5.0 * rng.random(int(new.sum()))
    days = joined[users] + (DAYS - joined[users]) * rng.random(len(users))
    start_s = (world.ends_at - timedelta(days=DAYS)).timestamp()
    return ((start_s + days * 86_400) * 1_000_000).astype(np.int64)


def _in_fashion(
    world: World,
    users: NDArray[np.int64],
    items: NDArray[np.int64],
    times: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items and times of each user's clicks, dealt out anew: items that come into fashion later get the later times."""
    rng = np.random.default_rng([world.seed, 2])
    fashion_times = rng.random(world.items)[items]
    key = world.drift * fashion_times + (1 - world.drift) * rng.random(len(items))
    return items[np.lexsort((key, users))], times[np.lexsort((times, users))]


def _user_id(number: int) -> str:
    """Mostly plain; some as real systems have them: numbers with zeros, slashes, blanks, other scripts."""
    match number % 200:
        case 7:
            return f"{number:07d}"
        case 57:
            return f"team/{number}/a"
        case 107:
            return f"zoë-{number}"
        case 157:
            return f"用户 {number}"
    return f"u-{number:05d}"


def _item_id(number: int) -> str:
    match number % 250:
        case 7:
            return f"{number:06d}"
        case 107:
            return f"sku/{number}"
        case 207:
            return f"café-{number}"
    return f"i-{number:05d}"


@dataclass(frozen=True, slots=True)
class Profiles:
    """Features by id; `unseen` items are in no interaction, and `new_user` and `new_item` in no table either."""

    users: Mapping[str, Features]
    items: Mapping[str, Features]
    unseen: tuple[str, ...]
    new_user: Features
    new_item: Features

    def write(self, folder: Path) -> None:
        """Both feature tables, as a night reads them."""
        users = {"user": list(self.users), **_feature_columns(self.users, ("country", "age"))}
        items = _feature_columns(self.items, ("item", "category", "price"))
        pq.write_table(pa.table(users), folder / USER_FEATURES)
        pq.write_table(pa.table(items), folder / ITEM_FEATURES)


def profiles_of(clicks: Clicks, seed: int = 0) -> Profiles:
    """Generate features that correlate with the clicks; the same clicks and seed give the same ones.

    A category is bought most in one country and at one age. Prices are log-normal around their category's.
    """
    rng = np.random.default_rng([seed, 1])
    kinds = np.array([CATEGORIES.index(category) for category in clicks.categories])
    count, new = len(kinds), max(2, round(UNSEEN_SHARE * len(kinds)))
    kinds = np.concatenate([kinds, np.arange(new) % (kinds.max() + 1)])
    usual = np.exp(rng.normal(3.2, 0.8, len(CATEGORIES)))
    prices = (usual[kinds] * np.exp(rng.normal(0.0, 0.4, len(kinds)))).round(2).clip(0.5)
    names = [*clicks.item_ids, *(f"unseen-{number:03d}" for number in range(new))]
    items: dict[str, Features] = {
        name: {"item": name, "category": CATEGORIES[kind], "price": price}
        for name, kind, price in zip(names, kinds.tolist(), prices.tolist(), strict=True)
    }
    favourite = _favourites(clicks, kinds)
    homes, ages = (
        rng.integers(len(COUNTRIES), size=len(CATEGORIES)), rng.uniform(22, 65, len(CATEGORIES))
    )  # fmt: skip
    anywhere = rng.integers(len(COUNTRIES), size=len(favourite))
    lives = np.where(rng.random(len(favourite)) < AT_HOME_SHARE, homes[favourite], anywhere)
    old = rng.normal(ages[favourite], 9.0).round().clip(16, 90)
    users: dict[str, Features] = {
        name: {"country": COUNTRIES[country_index], "age": age}
        for name, country_index, age in zip(
            clicks.user_ids, lives.tolist(), old.tolist(), strict=True
        )
    }
    likes = int(np.bincount(favourite).argmax())
    return Profiles(
        users,
        items,
        tuple(names[count:]),
        {"country": COUNTRIES[homes[likes]], "age": float(ages[likes].round())},
        {"item": "new-item", "category": CATEGORIES[likes], "price": float(usual[likes].round(2))},
    )


def _favourites(clicks: Clicks, kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Category that each user clicked most."""
    cells = clicks.user_rows * len(CATEGORIES) + kinds[clicks.item_rows]
    size = len(clicks.user_ids) * len(CATEGORIES)
    counts = np.bincount(cells, minlength=size).reshape(-1, len(CATEGORIES))
    return np.asarray(counts.argmax(axis=1))


def _feature_columns(
    of: Mapping[str, Features], names: tuple[str, ...]
) -> dict[str, list[str | float]]:
    return {name: [features[name] for features in of.values()] for name in names}
