"""Named filters of a night: read from its settings, and tried on the attributes of its items."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache.errors import ConfigError
from cache.filters.attributes import ItemAttributes
from cache.filters.expression import Filter, InvalidFilter, read_filter
from cache.filters.masks import FilterMask, mask_of
from precompute.config.settings import NightConfig


def named_filters(config: NightConfig) -> dict[str, Filter]:
    """Declared filters by name; raises ConfigError for an expression that is none."""
    filter_by_name = {}
    for name, filter_config in config.filters.items():
        try:
            filter_by_name[name] = read_filter(filter_config.filter)
        except InvalidFilter as error:
            raise _refused(name, error) from error
    return filter_by_name


def passing_filters(
    config: NightConfig, root: Path, attributes: Mapping[str, Any], count: int
) -> dict[str, FilterMask]:
    """Items that pass each declared filter, of `count` whose attributes were written below `root`.

    Raises ConfigError for a filter that does not fit the attributes.
    """
    declared = named_filters(config)
    if not declared:
        return {}
    columns, mask_by_filter = ItemAttributes.of_files(root, attributes, count), {}
    for name, declared_filter in declared.items():
        try:
            mask_by_filter[name] = FilterMask.of(mask_of(declared_filter.root, columns))
        except InvalidFilter as error:
            raise _refused(name, error) from error
    return mask_by_filter


def _refused(name: str, error: InvalidFilter) -> ConfigError:
    field_path = error.details.get("field")
    where = f"[filters.{name}]" if field_path is None else f"[filters.{name}] at {field_path}"
    return ConfigError(f"{where}: {error.message}", field="filters")
