"""The service: answers from the stored tiers first, computes live when it must, and always says which.

Rooms, lowest first: arrow_ipc, answers, tracing, requests, client, admission, config, metrics, generations, rendering,
usage, replica, lookup, quality, explain, dashboard, fast_lookup, http, fast_http, process; imports only go down. The
modules here put the rooms together. Start at `lookup.ladder`; `bootstrap` shows what runs.
"""

from importlib.util import find_spec
from pathlib import Path

_beside = Path(__file__).parents[1] / "cache/__init__.py"
_found = find_spec("cache")
if _found is None or Path(_found.origin or "") != _beside:
    # The name is a common one: a cache.py in the working folder, or another distribution's, would be found first.
    _place = (
        None if _found is None else _found.origin or list(_found.submodule_search_locations or ())
    )
    raise ImportError(
        f"Larder's serving found another package named cache, {_place}: set PYTHONSAFEPATH=1, start in "
        "another folder, or install Larder where that package is not",
        name=__name__,
    )
