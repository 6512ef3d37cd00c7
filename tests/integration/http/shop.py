"""A published night whose items have random attributes, and brute-force lists of the best items that pass."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache.filters.expression import read_filter
from cache.format.item_table import ItemTable
from cache.format.manifest import FORMAT_WITH_ATTRIBUTES, FORMAT_WITH_FILTERS
from cache.model.ranking import Metric, rank
from cache.records import decode_record
from precompute.adapters.vectors import from_vectors
from precompute.config.settings import FacetConfig, FilterConfig, NightConfig
from tests.integration.nights import DATA_UNTIL, histories, prepare, publish_night, raw_records
from tests.opened import open_generation
from tests.unit.cache.filters.columns import passes

ITEMS, USERS = 600, 150
BRANDS = [f"brand-{number}" for number in range(7)] + ["größe", "x,y"]
TAGS = ["new", "sale", "blue", "red"]
DAY_US = 86_400_000_000


@dataclass
class Shop:
    """A published night with its items, users and lists, by ordinal."""

    night: NightConfig
    attributes: list[dict[str, Any]]
    ids: list[str]
    vectors: Any
    users: dict[str, Any]
    seen_ordinals: dict[str, set[int]]
    metric: Metric = "inner_product"


def of_vectors(config: NightConfig, metric: Metric, *, are_folded: bool, is_alone: bool = False) -> NightConfig:
    """Make the same night from a bundle of random vectors; users' vectors are given (alone: only these) or folded."""
    rng = np.random.default_rng(3)
    items, users = (pq.read_table(config.path("items.parquet"))["item"].to_pylist(), sorted(histories(config)))
    numbers = [rng.standard_normal((len(ids), 24)).astype(np.float32) for ids in (items, users)]
    numbers[0] *= rng.uniform(0.2, 3, (len(items), 1)).astype(np.float32)
    to, clicks = config.path("model"), str(config.path("interactions.parquet"))
    if are_folded:
        from_vectors(items, numbers[0], to=to, clicks=clicks, metric=metric)
    else:
        from_vectors(items, numbers[0], users, numbers[1], to=to, metric=metric)
    vectors = None if are_folded else "model/user_vectors.parquet"
    tables = {name: table_config for name, table_config in config.tables.items() if name != "user_affinity"}
    sources = replace(config.sources, user_vectors=vectors)
    if is_alone:
        sources = replace(sources, interactions=())
    return replace(config, bundle="model/bundle", tables=tables, sources=sources)


def make_shop(
    folder: Path,
    redis_url: str,
    kind: str = "reference",
    filters: Mapping[str, FilterConfig] | None = None,
    facets: Mapping[str, FacetConfig] | None = None,
) -> Shop:
    """Make a night whose items have attributes, with these filters and facets."""
    config = prepare(folder, redis_url, users=USERS, items=ITEMS)
    metric: Metric = "cosine" if kind == "cosine" else "inner_product"
    if kind != "reference":
        config = of_vectors(config, metric, are_folded=kind == "folded", is_alone=kind == "alone")
    path = config.path("items.parquet")
    table = pq.read_table(path)
    rng = random.Random(7)
    rows = [drawn(rng) for _ in range(len(table))]
    times = [row.get("since") for row in rows]
    for name, values in {
        "brand": pa.array([row.get("brand") for row in rows], pa.string()),
        "tags": pa.array([row.get("tags") for row in rows], pa.list_(pa.string())),
        "price": pa.array([row.get("price") for row in rows], pa.float64()),
        "stock": pa.array([row.get("stock") for row in rows], pa.bool_()),
        "since": pa.array(times, pa.timestamp("us", tz="UTC")),
    }.items():
        table = table.append_column(name, values)
    pq.write_table(table, path)
    tables = {name: replace(table_config) for name, table_config in config.tables.items()}
    tables["user_vector"] = replace(tables["user_vector"], precision="f4")
    tables["user_topk"] = replace(tables["user_topk"], precision="f4")
    names = ("brand", "tags", "price", "stock", "since")
    sources = replace(config.sources, item_attributes=names)
    config = replace(config, tables=tables, sources=sources, filters=dict(filters or {}))
    config = replace(config, facets=dict(facets or {}))
    generation = publish_night(config, DATA_UNTIL)
    manifest, root = open_generation(config.store(), generation)
    assert manifest.format == (FORMAT_WITH_FILTERS if filters or facets else FORMAT_WITH_ATTRIBUTES)
    items = ItemTable.open(root, manifest)
    ids = items.ids_of(np.arange(items.count, dtype=np.uint32))
    of_item = dict(zip(table["item"].to_pylist(), rows, strict=True))
    clicked = histories(config)
    layout = manifest.tables["user_vector"].layout
    vectors = {
        user: decode_record(layout, raw).numbers
        for user, raw in raw_records(config, generation, sorted(clicked), "user_vector").items()
    }
    ordinals = {id_: at for at, id_ in enumerate(ids)}
    seen_ordinals_by_user = {user: {ordinals[id_] for id_ in clicked[user] if id_ in ordinals} for user in vectors}
    attributes = [of_item[id_] for id_ in ids]
    return Shop(config, attributes, ids, np.asarray(items.vectors), vectors, seen_ordinals_by_user, metric)


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return random attributes of an item, some missing."""
    attributes: dict[str, Any] = {
        "brand": rng.choice(BRANDS), "tags": tuple(rng.sample(TAGS, rng.randrange(4))),
        "price": round(rng.uniform(1, 100), 2), "stock": rng.random() < 0.8,
        "since": 20_000 * DAY_US + rng.randrange(400) * DAY_US,
    }  # fmt: skip
    return {name: value for name, value in attributes.items() if rng.random() < 0.95}


def filter_of(rng: random.Random) -> Any:
    """Return a filter that passes between one in some hundred items and all of them."""
    comparison_makers = [
        lambda: {"==": ["brand", rng.choice(BRANDS)]},
        lambda: {"in": ["brand", rng.sample(BRANDS, 3)]},
        lambda: {"contains": ["tags", rng.choice(TAGS)]},
        lambda: {rng.choice(["<", "<=", ">", ">="]): ["price", round(rng.uniform(0, 100), 2)]},
        lambda: {"==": ["stock", rng.random() < 0.8]},
        lambda: {">": ["since", 20_000 * 86_400 + rng.randrange(400) * 86_400]},
        lambda: {"exists": rng.choice(["brand", "price", "tags"])},
    ]
    parts = [rng.choice(comparison_makers)() for _ in range(rng.randrange(1, 5))]
    parts = [{"not": part} if rng.random() < 0.2 else part for part in parts]
    return parts[0] if len(parts) == 1 else {rng.choice(["and", "and", "or"]): parts}


def wanted_of(
    shop: Shop, vector: Any, excluded_ordinals: set[int], filter_: Any, k: int, metric: Metric = "inner_product"
) -> tuple[list[str], Any]:
    """Return ids and scores of the best k that pass, by looking at each item."""
    root = read_filter(filter_).root_expression
    ordinals = [
        at
        for at, item_attributes in enumerate(shop.attributes)
        if at not in excluded_ordinals and passes(root, item_attributes)
    ]
    if not ordinals:
        return [], np.empty(0, np.float32)
    ranked_ordinals, scores = rank(vector[None], shop.vectors, np.array([ordinals]), None, k, metric=metric)
    size = min(k, len(ordinals))
    return [shop.ids[at] for at in ranked_ordinals[0, :size]], scores[0, :size]
