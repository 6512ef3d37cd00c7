"""Inputs of a month's nights, by kind of bundle and of sources."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.config.settings import FilterConfig, GateThresholds, NightConfig, TableConfig
from tests.integration import nights
from tests.integration.changed.month import Month
from tests.integration.feature_towers import (
    COUNTRIES,
    MOODS,
    SCENTS,
    from_history_and_country,
    from_mood,
    from_scent,
    vectors_column,
    with_towers,
)

K: Final = 10
RARE: Final = "rare"
"""Brand of few items."""
LISTS: Final = ("user_topk", "item_similar")
_LENIENT: Final = {
    "unusable_rows": 1.0, "unknown_items": 1.0, "coverage_of_source": 0.0, "coverage_of_live": 0.0,
    "items_of_live": 0.0, "items_of_live_most": 1e9, "empty_lists": 1.0, "int8_overlap": 0.0, "int8_cosine": 0.0,
    "top_items": 1.0,
    "single_item": 1.0, "distinct_lists": 0.0, "score_psi": 1e9, "score_psi_retrained": 1e9, "list_jaccard": 0.0,
    "list_jaccard_retrained": 0.0, "top_items_of_live": 1e9, "distinct_lists_of_live": 0.0, "stale_lists": 1.0,
    "heldout_of_live": 0.0,
}  # fmt: skip
# `tests.regressions` runs tests of these worlds at commits that lack some of these thresholds.
LENIENT: Final = GateThresholds(**{name: limit for name, limit in _LENIENT.items() if hasattr(GateThresholds, name)})
"""Judgements are for real nights: these are small, and change a lot. Integrity is asked for as ever."""


def prepared(folder: Path, redis_url: str, *, users: int, items: int) -> NightConfig:
    """Write data and bundle of a small night, with short lists and short histories."""
    config = nights.prepare(folder, redis_url, users=users, items=items)
    tables = {**config.tables, "user_topk": TableConfig("user_topk", k=K)}
    return replace(config, history_limit=16, tables=tables, gates=LENIENT)


def reference(folder: Path, redis_url: str, seed: int, *, users: int = 160, items: int = 120) -> Month:
    """Return a month of the reference bundle, with lists filtered by an attribute of items."""
    config = prepared(folder, redis_url, users=users, items=items)
    add_columns(
        config,
        "items.parquet",
        stock=[number % 3 > 0 for number in range(items)],
        brand=["usual" if number % 13 else RARE for number in range(items)],
    )
    sources = replace(config.sources, item_attributes=("stock", "brand"))
    filters = {"in_stock": FilterConfig({"==": ["stock", True]}, LISTS)}
    config = replace(config, sources=sources, filters=filters)
    return Month.of(config, other_database(redis_url), seed)


def vectors(folder: Path, redis_url: str, seed: int, *, users: int = 160, items: int = 120) -> Month:
    """Return a month of the reference bundle in which every other user has a given vector."""
    config = prepared(folder, redis_url, users=users, items=items)
    users_with_vector = sorted(nights.histories(config))[::2]
    table = {"user": users_with_vector, "vector": vectors_column(len(users_with_vector), 4)}
    pq.write_table(pa.table(table), config.path("user_vectors.parquet"))
    config = replace(config, sources=replace(config.sources, user_vectors="user_vectors.parquet"))
    return Month.of(config, other_database(redis_url), seed)


def features(folder: Path, redis_url: str, seed: int, *, users: int = 160, items: int = 120) -> Month:
    """Return a month of towers with features, and of values; some users and items lack the features for these."""
    config = prepared(folder, redis_url, users=users, items=items)
    ids = sorted(nights.histories(config))
    moods = np.random.default_rng(5).random((len(ids), len(MOODS))).astype("f4").tolist()
    table = {
        "user": ids,
        "country": pa.array([row % COUNTRIES for row in range(len(ids))], pa.int64()),
        "mood": pa.array([None if row % 9 == 0 else mood for row, mood in enumerate(moods)], pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(table), config.path("users.parquet"))
    item_ids = pq.read_table(config.path("items.parquet"))["item"].to_pylist()
    scents = vectors_column(len(item_ids), 6, SCENTS).to_pylist()
    item_columns = {
        "item": item_ids,
        "looks": vectors_column(len(item_ids), 3),
        "scent": pa.array(
            [None if row % 7 == 0 else scent for row, scent in enumerate(scents)], pa.list_(pa.float32())
        ),
    }
    pq.write_table(pa.table(item_columns), config.path("items.parquet"))
    with_towers(config, from_history_and_country, {"mood": from_mood(), "worth": from_scent()})
    values = {
        "user_mood": TableConfig("value", value="mood", precision="f4"),
        "item_worth": TableConfig("value", value="worth"),
    }
    lists = {name: table_config for name, table_config in config.tables.items() if table_config.kind != "value"}
    sources = replace(config.sources, user_features="users.parquet")
    return Month.of(replace(config, sources=sources, tables=lists | values), other_database(redis_url), seed)


WORLDS: Final[dict[str, Callable[..., Month]]] = {"reference": reference, "features": features, "vectors": vectors}


def other_database(redis_url: str) -> str:
    """Return the URL of another database of the same Redis, for the full nights."""
    return redis_url.removesuffix("0") + "1"


def add_columns(config: NightConfig, name: str, **columns: list[Any]) -> None:
    """Add columns to a table."""
    table = pq.read_table(config.path(name))
    for column, values in columns.items():
        table = table.append_column(column, pa.array(values))
    pq.write_table(table, config.path(name))
