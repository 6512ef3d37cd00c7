"""Planted logs: groups of items, users with one group each, and their interactions on the replayed day."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.config.settings import NightConfig, ReferenceConfig, Sources

START = np.datetime64("2026-03-02T00:00:00", "s").astype(int)
DAY_S, HOUR_S = 86_400, 3_600
DAYS = 10
"""Days before the one that is replayed."""

Row = tuple[int, int, int]
"""User, item, and seconds since START."""


def write(folder: Path, rows: list[Row], groups: int = 20) -> NightConfig:
    """Write settings and a shuffled log of these rows; the model separates so many groups of items."""
    users, items, seconds = (np.array(column) for column in zip(*rows, strict=True))
    mixed = np.random.default_rng(1).permutation(len(rows))
    table = pa.table({
        "user": [f"u-{user}" for user in users[mixed]],
        "item": [f"i-{item}" for item in items[mixed]],
        "timestamp": pa.array(START + seconds[mixed], pa.timestamp("s")),
    })  # fmt: skip
    pq.write_table(table, folder / "log.parquet")
    return NightConfig(
        base=str(folder), artifacts=str(folder / "artifacts"),
        sources=Sources(("log.parquet",)), reference=ReferenceConfig(choose=False, dims=groups),
    )  # fmt: skip


def make_earlier_rows(
    rng: np.random.Generator, *, users: int, groups: int, size: int, items_per_user: int
) -> tuple[list[Row], np.ndarray]:
    """Return (rows of earlier days, group by user): each user takes `items_per_user` items of one group."""
    group_by_user = np.arange(users) % groups
    rows = [
        (user, int(group_by_user[user] * size + item), int(rng.integers(0, DAYS * DAY_S)))
        for user in range(users)
        for item in rng.choice(size, items_per_user, replace=False)
    ]
    return rows, group_by_user
