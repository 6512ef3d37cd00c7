"""The night: score every known entity, check the result, load it and publish it as one generation.

Rooms, lowest first: config, control, sources, bulk, bundles, erasures, releases, partitions, topk, device, builds,
scoring, erasing, gates, steps, operations, canary, planning, cli; imports only go down. Start at `steps`.
"""

import cache

# The name is a common one: a cache.py in the working folder, or another distribution's, would be found first.
if getattr(cache, "DISTRIBUTION", "") != "larder":
    raise ImportError(
        f"Larder's precompute found another package named cache, {cache.__file__}: set PYTHONSAFEPATH=1, start in "
        "another folder, or install Larder where that package is not",
        name=__name__,
    )
