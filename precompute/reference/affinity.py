"""Affinities of the reference model: directions that items share, by category or by clusters."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.ranking import unit
from precompute.sources.columns import strings_of

CLUSTERS = 16
_CLUSTER_ROUNDS = 20


def affinities(
    vectors: NDArray[np.float32],
    degrees: NDArray[np.float64],
    item_ids: Sequence[str] | pa.Array,
    categories: Sequence[str] | pa.Array | None,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Unit centroids [n, dims] and their labels: the given categories, or clusters named by their top item."""
    directions = unit(vectors)
    if categories is not None:
        coded = pc.dictionary_encode(strings_of(categories))
        names, name_indexes = np.unique(
            coded.dictionary.to_numpy(zero_copy_only=False).astype(str), return_inverse=True
        )
        groups = name_indexes[np.asarray(coded.indices)]
        blank = np.zeros((len(names), vectors.shape[1]), np.float32)
        return _centroids(directions, groups, len(names), blank), tuple(str(name) for name in names)
    cluster_count = min(CLUSTERS, len(vectors))
    groups = spherical_clusters(directions, cluster_count, rng)
    used = np.unique(groups)
    order = np.lexsort((np.arange(len(degrees)), -degrees))
    labels = [str(item_ids[order[groups[order] == cluster][0]]) for cluster in used]
    blank = np.zeros((cluster_count, vectors.shape[1]), np.float32)
    return _centroids(directions, groups, cluster_count, blank)[used], tuple(labels)


def spherical_clusters(
    directions: NDArray[np.float32], clusters: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Cluster of each unit vector by spherical k-means (Dhillon and Modha, 2001)."""
    centres = directions[rng.choice(len(directions), clusters, replace=False)]
    assigned = np.zeros(len(directions), np.int64)
    for _ in range(_CLUSTER_ROUNDS):
        nearest = (directions @ centres.T).argmax(axis=1)
        if np.array_equal(nearest, assigned):
            break
        assigned = nearest
        centres = _centroids(directions, assigned, clusters, centres)
    return assigned


def _centroids(
    directions: NDArray[np.float32],
    groups: NDArray[np.int64],
    count: int,
    otherwise: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Unit mean of each group; an empty group keeps what it had."""
    size = len(directions)
    member = sp.csr_matrix((np.ones(size, np.float32), (groups, np.arange(size))), (count, size))
    filled = np.bincount(groups, minlength=count) > 0
    return np.where(filled[:, None], unit(member @ directions), otherwise)
