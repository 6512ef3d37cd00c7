"""Drawn histories, where a night has no interactions: what models of histories are calibrated and compared on."""

from typing import Final

import numpy as np
import pyarrow as pa

from cache.format.item_table import ItemTable
from cache.model.ranking import Metric
from precompute.bundles.index import exact_neighbours
from precompute.partitions.shard_input import ShardInput

USERS_MAX: Final = 512
LONGEST: Final = 50


def with_drawn_histories(
    entities: ShardInput, items: ItemTable, metric: Metric, *, seed: int
) -> ShardInput:
    """At most 512 of the users with a vector, spread evenly, each with 1 to 50 of the 100 items that suit it best.

    Not any items: those of one history are alike, and a model calibrated on means of unlike ones would meet larger
    numbers than it was made for.
    """
    with_vector = np.flatnonzero(entities.has_vector)
    sample_points = np.linspace(0, len(with_vector) - 1, min(USERS_MAX, len(with_vector)))
    rows = with_vector[np.unique(sample_points.astype(np.int64))]
    user_vectors = entities.vectors
    assert user_vectors is not None  # noqa: S101 - else none had one
    rng = np.random.default_rng(seed)
    histories = [
        rng.permutation(best_ordinals)[: rng.integers(1, LONGEST, endpoint=True)]
        for best_ordinals in exact_neighbours(np.asarray(items.vectors), user_vectors[rows], metric)
    ]
    return ShardInput(
        ids=entities.ids.take(pa.array(rows)),
        hashes=entities.hashes[rows],
        indptr=np.cumsum([0, *map(len, histories)]),
        ordinals=np.concatenate(histories),
        features={name: column.take(pa.array(rows)) for name, column in entities.features.items()},
        history_limit=entities.history_limit,
        vectors=user_vectors[rows],
    )
