"""The night: score every known entity, check the result, load it and publish it as one generation.

Start at `steps`.
"""

from importlib.util import find_spec
from pathlib import Path

_own_cache_path = Path(__file__).parents[1] / "cache/__init__.py"
_cache_spec = find_spec("cache")
if _cache_spec is None or Path(_cache_spec.origin or "") != _own_cache_path:
    # The name is common: Python would first find a cache.py in the working folder, or the package of another
    # distribution.
    _foreign_location = (
        None if _cache_spec is None else _cache_spec.origin or list(_cache_spec.submodule_search_locations or ())
    )
    raise ImportError(
        f"Larder's precompute found another package named cache, {_foreign_location}: set PYTHONSAFEPATH=1, start in "
        "another folder, or install Larder where that package is not",
        name=__name__,
    )
