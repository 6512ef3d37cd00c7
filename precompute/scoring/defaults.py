"""Default lists for unknown users: the most popular items, or those with the highest mean scores."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.ranking import Metric, score, unit_rows
from cache.store.artefacts import write_atomically
from cache.topk.topk import Scorer
from precompute.builds.build import Build
from precompute.builds.tables import configured_tables, layout_of
from precompute.bundles.bundle import Bundle
from precompute.config.settings import TableConfig

DEFAULTS_FILE = "defaults.json"
_ITEMS_AT_ONCE: Final = 4_096

Favourites = tuple[Sequence[str], list[float]]
"""Ids of items, best first, and their scores."""


def write_defaults(build: Build, bundle: Bundle, find_table_favourites: Callable[[TableConfig], Favourites]) -> None:
    """Write the default list of each table of lists; the caller publishes the file."""
    defaults = {}
    for table_name, table in configured_tables(build.config, bundle).items():
        if layout_of(bundle, table).kind == "topk":
            item_ids, scores = find_table_favourites(table)
            defaults[table_name] = {"items": item_ids, "scores": scores}
    write_atomically(build.path(DEFAULTS_FILE), orjson.dumps(defaults, option=orjson.OPT_SORT_KEYS))


def find_favourites(items: ItemTable, user_vectors: NDArray[np.float32], metric: Metric, k: int) -> Favourites:
    """Return the k items with the highest mean score over users, float32 [n, dims], and the scores; ties by ordinal.

    The mean of products with an item equals the product with the mean vector.
    """
    mean_vector = (unit_rows(user_vectors) if metric == "cosine" else user_vectors).mean(axis=0, dtype=np.float64)
    item_vectors = np.asarray(items.vectors)
    if metric == "cosine":
        item_vectors = unit_rows(item_vectors)
    scorer = Scorer.of(np.ascontiguousarray(item_vectors))
    ordinals, scores = scorer.top(mean_vector.astype(np.float32)[None], min(k, items.count))
    return items.ids_of(ordinals[0]), scores[0].tolist()


def compute_popularity_scores(interactions_by_item: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return each item's share of all interactions, float32 [items]: its score in the defaults."""
    item_shares: NDArray[np.float32] = (interactions_by_item / max(1, int(interactions_by_item.sum()))).astype(
        np.float32
    )
    return item_shares


def compute_mean_scores(items: ItemTable, user_vectors: NDArray[np.float32], metric: Metric) -> NDArray[np.float32]:
    """Return each item's mean score over these users, float32 [items], computed as in `find_favourites`."""
    mean_vector = (unit_rows(user_vectors) if metric == "cosine" else user_vectors).mean(axis=0, dtype=np.float64)
    item_vectors = np.asarray(items.vectors)
    if metric == "cosine":
        item_vectors = unit_rows(item_vectors)
    query, item_scores = (mean_vector.astype(np.float32)[None], np.empty(items.count, np.float32))
    for first_item in range(0, items.count, _ITEMS_AT_ONCE):
        ordinals = np.arange(first_item, min(first_item + _ITEMS_AT_ONCE, items.count))
        item_scores[ordinals] = score(query, item_vectors, ordinals[None])[0]
    return item_scores
