"""A small world to recommend in: users with a few tastes, items of Zipf popularity, their clicks and features."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

Features = Mapping[str, str]

CATEGORIES = (
    "bags", "books", "coats", "coffee", "garden", "games", "knits", "lamps", "music", "outdoor",
    "paper", "shoes", "tea", "tools", "toys", "travel", "watches", "wool", "wood", "workwear",
)  # fmt: skip

COUNTRIES = ("AT", "BR", "CA", "DE", "ES", "FR", "IN", "JP", "MX", "NL", "PL", "SE", "US", "ZA")
ODD_USER_IDS = {7: "{:07d}", 57: "team/{}/a", 107: "zoë-{}", 157: "用户 {}"}
ODD_ITEM_IDS = {7: "{:06d}", 107: "sku/{}", 207: "café-{}"}
"""Forms of a few ids, by their number: zeros, slashes, blanks and other scripts, as real systems have them."""

DAYS = 60.0
GROUPS_PER_CATEGORY = 5

TASTES = (0.6, 0.3, 0.1)
"""Share of a user's clicks that goes to the first, second and third group of items that the user likes."""


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
    # Items lie sorted by group, so that a group is one stretch of the cumulated popularity.
    groups = max(2, min(len(CATEGORIES) * GROUPS_PER_CATEGORY, world.items // 20))
    group_of_item = np.sort(rng.integers(groups, size=world.items))
    popularity = rng.permutation(1.0 / np.arange(1, world.items + 1) ** 0.9)
    ends = np.concatenate([[0.0], np.cumsum(popularity)])
    bounds = ends[np.searchsorted(group_of_item, np.arange(groups + 1))]

    clicks_of_user = 8 + rng.lognormal(2.7, 0.8, world.users).astype(np.int64).clip(1, 400)
    users = np.repeat(np.arange(world.users), clicks_of_user)
    # Groups are popular or not as well: without it, distinct clicks alone would flatten the skew.
    liked = rng.permutation(1.0 / (3.0 + np.arange(groups)) ** 0.8)
    tastes = rng.choice(groups, (world.users, len(TASTES)), p=liked / liked.sum())
    group = tastes[users, rng.choice(len(TASTES), len(users), p=TASTES)]
    low, high = bounds[group], bounds[group + 1]
    drawn = np.searchsorted(ends, low + (high - low) * rng.random(len(users)), side="right") - 1
    # A group without an item sends its clicks to its neighbour.
    items = np.clip(drawn, 0, world.items - 1)

    joined = rng.random(world.users) * 0.7 * DAYS
    new = rng.random(world.users) < world.newcomers
    joined[new] = DAYS - 5.0 * rng.random(int(new.sum()))
    days = joined[users] + (DAYS - joined[users]) * rng.random(len(users))
    start_s = (world.ends_at - timedelta(days=DAYS)).timestamp()
    times = ((start_s + days * 86_400) * 1_000_000).astype(np.int64)
    if world.drift:
        # Each user's clicks are dealt out anew: items that come into fashion later get the later times.
        rng = np.random.default_rng([world.seed, 2])
        fashion_times = rng.random(world.items)[items]
        key = world.drift * fashion_times + (1 - world.drift) * rng.random(len(items))
        items, times = items[np.lexsort((key, users))], times[np.lexsort((times, users))]

    order = np.argsort(times, kind="stable")
    users, items, times = users[order], items[order], times[order]
    # A second click on the same item says nothing new; the first one counts.
    _, first = np.unique(users * world.items + items, return_index=True)
    first.sort()
    return Clicks(
        tuple(ODD_USER_IDS.get(n % 200, "u-{:05d}").format(n) for n in range(world.users)),
        tuple(ODD_ITEM_IDS.get(n % 250, "i-{:05d}").format(n) for n in range(world.items)),
        tuple(CATEGORIES[n // GROUPS_PER_CATEGORY % len(CATEGORIES)] for n in group_of_item),
        users[first],
        items[first],
        times[first],
    )


@dataclass(frozen=True, slots=True)
class Profiles:
    """Features by id; some items are in no interaction."""

    users: Mapping[str, Features]
    items: Mapping[str, Features]

    @property
    def tables(self) -> dict[str, list[dict[str, str]]]:
        """Rows of the feature tables, by the setting of a night that names their file."""
        users = [{"user": user, **features} for user, features in self.users.items()]
        return {"user_features": users, "item_features": list(map(dict, self.items.values()))}


def profiles_of(clicks: Clicks) -> Profiles:
    """Return features that go with the clicks: a user's country follows from the category clicked most."""
    categories = dict(zip(clicks.item_ids, clicks.categories, strict=True))
    categories |= {f"unseen-{category}": category for category in clicks.categories}
    codes = np.array([CATEGORIES.index(category) for category in clicks.categories])
    counts = np.zeros((len(clicks.user_ids), len(CATEGORIES)), np.int64)
    np.add.at(counts, (clicks.user_rows, codes[clicks.item_rows]), 1)
    countries = [COUNTRIES[code % len(COUNTRIES)] for code in counts.argmax(axis=1)]
    users = zip(clicks.user_ids, countries, strict=True)
    return Profiles(
        {user: {"country": country} for user, country in users},
        {item: {"item": item, "category": category} for item, category in categories.items()},
    )
