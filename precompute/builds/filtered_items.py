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
    begin_report = build.need("begin")
    for path in paths_of(begin_report["attributes"]):
        build.fetch(path)
    count = int(begin_report["items"])
    filter_mask_by_name = passing_filters(
        build.config, build.root, begin_report["attributes"], count
    )
    everything = np.arange(count)
    return {
        name: filter_mask_by_name[filter_].among(everything)
        for name, (_, filter_) in filtered.items()
    }
