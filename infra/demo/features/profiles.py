"""Features of the synthetic world: a country and an age per user, a category and a price per item."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from infra.demo.synthetic import CATEGORIES, Clicks

COUNTRIES = ("AT", "BR", "CA", "DE", "ES", "FR", "IN", "JP", "MX", "NL", "PL", "SE", "US", "ZA")
USER_FEATURES, ITEM_FEATURES = "user_features.parquet", "item_features.parquet"
AT_HOME = 0.7
"""Share of users who live where their favourite category is bought most."""
UNSEEN_SHARE = 0.01
"""Items in no interaction yet, as a share of the others: the catalogue has their features."""

Features = Mapping[str, str | float]
"""Features of one user or item by column, as a caller sends them."""


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
        users = {"user": list(self.users), **_columns(self.users, ("country", "age"))}
        items = _columns(self.items, ("item", "category", "price"))
        pq.write_table(pa.table(users), folder / USER_FEATURES)
        pq.write_table(pa.table(items), folder / ITEM_FEATURES)


def profiles_of(clicks: Clicks, seed: int = 0) -> Profiles:
    """Features that go with what was clicked; the same clicks and seed give the same ones.

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
    lives = np.where(rng.random(len(favourite)) < AT_HOME, homes[favourite], anywhere)
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


def _columns(of: Mapping[str, Features], names: tuple[str, ...]) -> dict[str, list[str | float]]:
    return {name: [features[name] for features in of.values()] for name in names}
