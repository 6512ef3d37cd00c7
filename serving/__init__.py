"""The service: answers from the stored tiers first, computes live when it must, and always says which.

Rooms, lowest first: arrow_ipc, answers, tracing, requests, client, admission, config, metrics, generations, rendering,
usage, replica, lookup, quality, explain, dashboard, fast_lookup, http, fast_http, process; imports only go down. The
modules here put the rooms together. Start at `lookup.ladder`; `bootstrap` shows what runs.
"""

import cache

# The name is a common one: a cache.py in the working folder, or another distribution's, would be found first.
if getattr(cache, "DISTRIBUTION", "") != "larder":
    raise ImportError(
        f"Larder's serving found another package named cache, {cache.__file__}: set PYTHONSAFEPATH=1, start in "
        "another folder, or install Larder where that package is not",
        name=__name__,
    )
