"""Items that the lists of tables made under filters are of."""

import numpy as np
from numpy.typing import NDArray

from precompute.builds.build import Build
from precompute.partitions.item_attributes import paths_of
from precompute.partitions.named_filters import passing_filters


def allowed_items(build: Build) -> dict[str, NDArray[np.bool_]]:
    """Mask bool [items] for each table made under a filter, by the table's own name."""
    filtered = build.config.filtered
    if not filtered:
        return {}
    begun = build.need("begin")
    for path in paths_of(begun["attributes"]):
        build.fetch(path)
    count = int(begun["items"])
    passing = passing_filters(build.config, build.root, begun["attributes"], count)
    everything = np.arange(count)
    return {name: passing[filter_].among(everything) for name, (_, filter_) in filtered.items()}
