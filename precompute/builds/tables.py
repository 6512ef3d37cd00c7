"""Tables of a generation: the entity set, layout, metric and producer of each, from configuration and bundle."""

from collections.abc import Mapping

from cache.errors import ConfigError
from cache.format.manifest import EntityKind, Producer
from cache.model.ranking import Metric
from cache.records import Layout
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, TableConfig

STRING_OVERHEAD_BYTES = 64
"""Overhead of a Redis string in bytes, rounded up.
jemalloc's size classes are powers of two with four steps between: a page of exactly 256 KiB with its header would take
320."""


ENTITY_BY_TABLE_KIND: Mapping[str, EntityKind] = {
    "user_topk": "user", "user_vector": "user", "item_vector": "item", "item_similar": "item",
}  # fmt: skip
"""Entity set of each kind of table; the entity set of a value table is that of its model."""


def entity_of(bundle: Bundle, table_name: str, table_config: TableConfig) -> EntityKind:
    """Return the entity set of a table; raise ConfigError for a model output that the bundle lacks."""
    if table_config.kind != "value":
        return ENTITY_BY_TABLE_KIND[table_config.kind]
    if table_config.value not in bundle.value_models:
        raise ConfigError(
            f"[tables.{table_name}] has the value {table_config.value!r}, which the bundle does not have (it has "
            f"{', '.join(bundle.value_models) or 'none'}): set value to one of these, or import or hand over "
            "a bundle with "
            f"{table_config.value!r}"
        )
    return bundle.value_models[str(table_config.value)].entity


def layout_of(bundle: Bundle, table_config: TableConfig) -> Layout:
    """Return the record layout of a table."""
    match table_config.kind:
        case "user_topk" | "item_similar":
            return Layout("topk", table_config.k, table_config.precision)
        case "user_vector" | "item_vector":
            return Layout("vector", bundle.dims, table_config.precision)
        case "value":
            return Layout(
                "value", bundle.value_models[str(table_config.value)].spec.output_dims, table_config.precision
            )


def demand_table_values(config: NightConfig, bundle: Bundle) -> None:
    """Raise ConfigError for the first table with a value that the bundle does not have."""
    for table_name, table_config in configured_tables(config, bundle).items():
        entity_of(bundle, table_name, table_config)


def demand_histories(config: NightConfig, bundle: Bundle) -> None:
    """Raise ConfigError if users only have features, but the model needs a history."""
    sources = config.sources
    has_features_alone = not sources.interactions and not sources.user_vectors
    if has_features_alone and bundle.needs_history and not bundle.answers_without_history:
        raise ConfigError(
            "sources.interactions and sources.user_vectors are empty, but the model takes a history and no "
            "features: name the files of interactions, or those of vectors of users"
        )


def facet_layout(list_length: int) -> Layout:
    """Return the layout of a facet's lists: float32, since mean scores may be of any size."""
    return Layout("topk", list_length, "f4")


def metric_of(bundle: Bundle, table_config: TableConfig) -> Metric:
    """Return the metric of a top-K table: its own, else cosine for similar items, else the bundle's."""
    return table_config.metric or ("cosine" if table_config.kind == "item_similar" else bundle.metric)


def producer_of(bundle: Bundle, table_config: TableConfig) -> Producer:
    """Return the producer that answers for a table if there is no record."""
    match table_config.kind:
        case "user_topk":
            return Producer("topk", "user_tower", metric_of(bundle, table_config))
        case "item_similar":
            return Producer("similar", "item_tower", metric_of(bundle, table_config))
        case "user_vector":
            return Producer("tower", "user_tower")
        case "item_vector":
            return Producer("tower", "item_tower")
        case "value":
            return Producer("value", table_config.value)


def configured_tables(config: NightConfig, bundle: Bundle) -> dict[str, TableConfig]:
    """Return the tables to build; of the default ones only those whose model the bundle has."""
    if config.tables != NightConfig().tables:
        return dict(config.tables)
    return {
        name: table_config
        for name, table_config in config.tables.items()
        if table_config.kind != "value" or table_config.value in bundle.value_models
    }


def scored_tables(config: NightConfig, bundle: Bundle, entity: EntityKind | None = None) -> dict[str, TableConfig]:
    """Return the tables with pages to write, by their own names, those under filters included; `entity` selects some.

    A table under a filter is configured like its base table, but its lists have only items that pass the filter.
    """
    config_by_table = configured_tables(config, bundle)
    config_by_table |= {
        name: config_by_table[unfiltered_table]
        for name, (unfiltered_table, _) in config.table_and_filter_by_name.items()
    }
    return {
        name: table_config
        for name, table_config in config_by_table.items()
        if entity is None or entity_of(bundle, name, table_config) == entity
    }


def records_per_page(layout: Layout, page_bytes: int) -> int:
    """Return the number of whole records that fit into `page_bytes` of Redis' memory; at least one."""
    return max(1, (page_bytes - STRING_OVERHEAD_BYTES) // layout.size_bytes)
