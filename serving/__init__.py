"""The service: answers from the stored tiers if it can, else by live inference, and names the source in each answer.

Start at `bootstrap`.
"""

from importlib.util import find_spec
from pathlib import Path

_own_cache_path = Path(__file__).parents[1] / "cache/__init__.py"
_cache_spec = find_spec("cache")
if _cache_spec is None or Path(_cache_spec.origin or "") != _own_cache_path:
    # `cache` is a common name: Python would import a cache.py in the working folder, or another distribution's, first.
    _foreign_location = (
        None if _cache_spec is None else _cache_spec.origin or list(_cache_spec.submodule_search_locations or ())
    )
    raise ImportError(
        f"Larder's serving found another package named cache, {_foreign_location}: set PYTHONSAFEPATH=1, start in "
        "another folder, or install Larder where that package is not",
        name=__name__,
    )
