"""Clusters of items by direction."""

import numpy as np

from precompute.reference.train import cluster_spherically


def test_clusters_find_separate_directions():
    directions = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    clusterings = [cluster_spherically(directions, 3, np.random.default_rng(seed)) for seed in range(20)]

    best_clustering = max(clusterings, key=lambda groups: len(np.unique(groups)))

    assert [len(np.unique(best_clustering[start : start + 20])) for start in (0, 20, 40)] == [1, 1, 1]
