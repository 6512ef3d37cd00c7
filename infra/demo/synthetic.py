"""Synthetic data: users with a few tastes, items of Zipf popularity, clicks and features."""

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
ODD_USER_ID_FORMATS = {7: "{:07d}", 57: "team/{}/a", 107: "zoë-{}", 157: "用户 {}"}
ODD_ITEM_ID_FORMATS = {7: "{:06d}", 107: "sku/{}", 207: "café-{}"}
"""Formats of a few ids, by ordinal: leading zeros, slashes, blanks and other scripts, as in real systems."""

CLICK_DAYS = 60.0
GROUPS_PER_CATEGORY = 5

TASTE_SHARES = (0.6, 0.3, 0.1)
"""Shares of a user's clicks in the first, second and third group of items that the user likes."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """Size and time of the synthetic data: clicks end at `last_click_at`."""

    user_count: int = 20_000
    item_count: int = 5_000
    seed: int = 0
    last_click_at: datetime = datetime(2026, 1, 31, tzinfo=UTC)
    newcomer_share: float = 0.03
    """Share of users whose first click falls into the last five days."""
    fashion_weight: float = 0.0
    """Weight (0 to 1) of an item's time in fashion in the order of a user's clicks; the rest of the order is random."""


@dataclass(frozen=True, slots=True, eq=False)
class Clicks:
    """Distinct (user, item) pairs sorted by time: indices into the ids, and times in microseconds since 1970."""

    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    category_by_item: tuple[str, ...]
    user_rows: NDArray[np.int64]
    item_rows: NDArray[np.int64]
    times_us: NDArray[np.int64]


def synthesize(world: WorldSettings) -> Clicks:
    """Return the clicks for the settings; equal settings give identical clicks."""
    rng = np.random.default_rng(world.seed)
    # Items are sorted by group, so that a group is one interval of the cumulative popularity.
    group_count = max(2, min(len(CATEGORIES) * GROUPS_PER_CATEGORY, world.item_count // 20))
    group_of_item = np.sort(rng.integers(group_count, size=world.item_count))
    popularity = rng.permutation(1.0 / np.arange(1, world.item_count + 1) ** 0.9)
    popularity_ends = np.concatenate([[0.0], np.cumsum(popularity)])
    group_bounds = popularity_ends[np.searchsorted(group_of_item, np.arange(group_count + 1))]

    clicks_of_user = 8 + rng.lognormal(2.7, 0.8, world.user_count).astype(np.int64).clip(1, 400)
    click_users = np.repeat(np.arange(world.user_count), clicks_of_user)
    # Groups differ in popularity, too: otherwise removing repeated clicks would flatten the skew of items.
    group_popularity = rng.permutation(1.0 / (3.0 + np.arange(group_count)) ** 0.8)
    groups_by_user = rng.choice(
        group_count, (world.user_count, len(TASTE_SHARES)), p=group_popularity / group_popularity.sum()
    )
    click_groups = groups_by_user[click_users, rng.choice(len(TASTE_SHARES), len(click_users), p=TASTE_SHARES)]
    group_starts, group_ends = group_bounds[click_groups], group_bounds[click_groups + 1]
    drawn_items = (
        np.searchsorted(
            popularity_ends, group_starts + (group_ends - group_starts) * rng.random(len(click_users)), side="right"
        )
        - 1
    )
    # Clicks on a group without items go to a neighbouring item.
    click_items = np.clip(drawn_items, 0, world.item_count - 1)

    joined_days = rng.random(world.user_count) * 0.7 * CLICK_DAYS
    newcomer_mask = rng.random(world.user_count) < world.newcomer_share
    joined_days[newcomer_mask] = CLICK_DAYS - 5.0 * rng.random(int(newcomer_mask.sum()))
    click_days = joined_days[click_users] + (CLICK_DAYS - joined_days[click_users]) * rng.random(len(click_users))
    start_s = (world.last_click_at - timedelta(days=CLICK_DAYS)).timestamp()
    times = ((start_s + click_days * 86_400) * 1_000_000).astype(np.int64)
    if world.fashion_weight:
        # Reassign each user's click times: items that come into fashion later get later times.
        rng = np.random.default_rng([world.seed, 2])
        fashion_times = rng.random(world.item_count)[click_items]
        fashion_keys = world.fashion_weight * fashion_times + (1 - world.fashion_weight) * rng.random(len(click_items))
        click_items, times = (
            click_items[np.lexsort((fashion_keys, click_users))],
            times[np.lexsort((times, click_users))],
        )

    time_order = np.argsort(times, kind="stable")
    click_users, click_items, times = (click_users[time_order], click_items[time_order], times[time_order])
    # Keep only a user's first click on an item.
    _, first_click_rows = np.unique(click_users * world.item_count + click_items, return_index=True)
    first_click_rows.sort()
    return Clicks(
        tuple(
            ODD_USER_ID_FORMATS.get(ordinal % 200, "u-{:05d}").format(ordinal) for ordinal in range(world.user_count)
        ),
        tuple(
            ODD_ITEM_ID_FORMATS.get(ordinal % 250, "i-{:05d}").format(ordinal) for ordinal in range(world.item_count)
        ),
        tuple(CATEGORIES[ordinal // GROUPS_PER_CATEGORY % len(CATEGORIES)] for ordinal in group_of_item),
        click_users[first_click_rows],
        click_items[first_click_rows],
        times[first_click_rows],
    )


@dataclass(frozen=True, slots=True)
class Profiles:
    """Features by id of users and of items, some of which have no interactions."""

    users: Mapping[str, Features]
    items: Mapping[str, Features]

    @property
    def tables(self) -> dict[str, list[dict[str, str]]]:
        """Return the rows of the feature tables by the name of their setting in `[sources]`."""
        users = [{"user": user, **features} for user, features in self.users.items()]
        return {"user_features": users, "item_features": list(map(dict, self.items.values()))}


def make_profiles(clicks: Clicks) -> Profiles:
    """Return features that correlate with the clicks: a user's country depends on the category clicked most."""
    category_by_item = dict(zip(clicks.item_ids, clicks.category_by_item, strict=True))
    category_by_item |= {f"unseen-{category}": category for category in clicks.category_by_item}
    category_codes = np.array([CATEGORIES.index(category) for category in clicks.category_by_item])
    click_counts = np.zeros((len(clicks.user_ids), len(CATEGORIES)), np.int64)
    np.add.at(click_counts, (clicks.user_rows, category_codes[clicks.item_rows]), 1)
    countries = [COUNTRIES[code % len(COUNTRIES)] for code in click_counts.argmax(axis=1)]
    users = zip(clicks.user_ids, countries, strict=True)
    return Profiles(
        {user: {"country": country} for user, country in users},
        {item: {"item": item, "category": category} for item, category in category_by_item.items()},
    )
