"""Seal of a generation: its manifest, written from the reports of the steps."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cache.format.manifest import (
    FACET_PREFIX,
    FEATURE_ONLY_USERS_FACT,
    FORMAT_WITH_ATTRIBUTES,
    FORMAT_WITH_EVENTS,
    FORMAT_WITH_FILTERS,
    FORMAT_WITH_WEIGHTS,
    MANIFEST_FORMAT,
    Artefact,
    Attribute,
    DirectoryPart,
    EntitySet,
    IncludedEvents,
    Index,
    ItemFiles,
    Manifest,
    Model,
    NamedFilter,
    Producer,
    SeenPart,
    Table,
    TablePart,
)
from cache.model.input_preparation import HISTORY_LIMIT
from cache.store.artefacts import generation_path
from precompute.builds.build import Build, attribute_paths, data_until_of, fetch_catalogue, open_bundle
from precompute.builds.reports import (
    ASSEMBLE_REPORT,
    BEGIN_REPORT,
    EMBED_ITEMS_REPORT,
    INDEX_REPORT,
    QUANTIZE_REPORT,
    FacetEntry,
    FileEntry,
    ModelEntry,
    PagesEntry,
    ShardReport,
    file_entry,
    shard_report_name,
)
from precompute.builds.tables import (
    configured_tables,
    entity_of,
    facet_layout,
    layout_of,
    producer_of,
    records_per_page,
)
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, TableConfig
from precompute.partitions import catalogue
from precompute.partitions.night_input import EventFields
from precompute.partitions.shard_files import first_hash
from precompute.sources.unusable import UNKNOWN_ITEMS_NAMED_FIELD, merge_reports

WITHOUT_INTERACTIONS_FACT = "without_interactions"
"""Fact of a generation whose night had no table of interactions; other generations lack it."""

WRITER_TEXT_BY_FORMAT = {
    FORMAT_WITH_WEIGHTS: "a night of a model with weights beside its file writes",
    FORMAT_WITH_ATTRIBUTES: "a night of items with attributes writes",
    FORMAT_WITH_FILTERS: "a night of declared filters or facets writes",
    FORMAT_WITH_EVENTS: "a night of fresh events writes",
}
"""Manifest version above the first -> words for the nights that write it."""

CollectFacts = Callable[[Build, Sequence[ShardReport]], Mapping[str, Any]]
"""Function that returns one feature's facts for the manifest, from a build and the reports of its shards."""


def write_manifest(build: Build, fact_collectors: Iterable[CollectFacts]) -> Manifest:
    """Write the manifest from the steps' reports, with the facts of the `fact_collectors`, unless it exists.

    Returns the stored manifest.
    """
    manifest_path = generation_path(build.generation, "manifest.json")
    if (manifest_bytes := build.store.read(manifest_path)) is not None:
        return Manifest.from_bytes(manifest_bytes)
    config, bundle = build.config, open_bundle(build)
    begin_report, embed_report = (build.need_report(BEGIN_REPORT), build.need_report(EMBED_ITEMS_REPORT))
    build.need_report(ASSEMBLE_REPORT)
    index_report, quantize_report = (build.need_report(INDEX_REPORT), build.need_report(QUANTIZE_REPORT))
    shard_reports = [build.need_report(shard_report_name(shard)) for shard in range(config.shards)]
    fetch_catalogue(build)
    files_by_attribute = begin_report.get("attributes", {})
    facet_by_name = begin_report.get("facets") or embed_report.get("facets") or {}
    for catalogue_file in (catalogue.ITEM_VECTORS_FILE, *attribute_paths(files_by_attribute)):
        build.fetch(catalogue_file)
    build.fetch("defaults.json")
    manifest = Manifest(
        namespace=config.namespace,
        generation=build.generation,
        data_until=data_until_of(build.generation),
        created_at=int(time.time()),
        bundle_digest=begin_report["bundle_digest"],
        inputs_digest=begin_report["inputs_digest"],
        entity_sets={
            "user": _entity_set(
                "user", begin_report["user_seed"], [report["users"]["directory"] for report in shard_reports]
            ),
            "item": _entity_set(
                "item",
                begin_report["item_seed"],
                [
                    file_entry(build.describe(catalogue.directory_file_path("item", shard)))
                    for shard in range(config.shards)
                ],
            ),
        }
        | {f"{FACET_PREFIX}{name}": _facet_entity_set(name, facet) for name, facet in facet_by_name.items()},
        items=ItemFiles(
            ids=build.describe(catalogue.ITEM_IDS_FILE),
            offsets=build.describe(catalogue.ITEM_OFFSETS_FILE),
            vectors=build.describe(catalogue.ITEM_VECTORS_FILE),
            model_index=build.describe(catalogue.MODEL_INDEX_FILE),
            count=begin_report["items"],
            dims=bundle.dims,
            attributes={
                name: Attribute(
                    kind, **{file_field: build.describe(file) for file_field, file in path_by_field.items()}
                )
                for name, (kind, path_by_field) in files_by_attribute.items()
            },
        ),
        tables=_manifest_tables(config, bundle, shard_reports)
        | {name: _facet_table(config, name, facet["table"]) for name, facet in facet_by_name.items()},
        models={name: _manifest_model(entry) for name, entry in quantize_report["models"].items()},
        indexes={
            name: Index(entry["metric"], entry["kind"], Artefact(**entry["file"]), entry["recall"])
            for name, entry in index_report["indexes"].items()
        },
        defaults=build.describe("defaults.json"),
        timings={
            "begin": begin_report["seconds"],
            "embed_items": embed_report["seconds"],
            "index": index_report["seconds"],
            "quantize": quantize_report["seconds"],
            "score": scoring_seconds(shard_reports),
        },
        gates=(),  # `verify` adds its verdicts later
        facts={
            "users_in_source": begin_report["users"],
            FEATURE_ONLY_USERS_FACT: begin_report.get(FEATURE_ONLY_USERS_FACT, False),
            "users_scored": sum(report["users"]["scored"] for report in shard_reports),
            "users_without_input": sum(report["users"]["without_input"] for report in shard_reports),
            "short_lists": sum(report["users"]["short"] for report in shard_reports),
            "interactions": begin_report["interactions"],
            **({} if config.sources.interactions else {WITHOUT_INTERACTIONS_FACT: True}),
            "interactions_with_unknown_items": begin_report["unknown_items"],
            **(
                {UNKNOWN_ITEMS_NAMED_FIELD: named_items}
                if (named_items := begin_report.get(UNKNOWN_ITEMS_NAMED_FIELD))
                else {}
            ),
            "items_without_vector": begin_report["items_without_vector"],
            HISTORY_LIMIT: config.history_limit,
            "inputs": begin_report["inputs"],
            "unusable": merge_reports(
                [
                    begin_report.get("unusable", {}),
                    *(
                        scores.get("unusable", {})
                        for report in shard_reports
                        for scores in (report["users"], report["items"])
                    ),
                ]
            ),
            **({"remarks": begin_report["remarks"]} if begin_report.get("remarks") else {}),
            "vocabulary_digest": bundle.vocabulary_digest,
            **{
                name: fact
                for collect_facts in fact_collectors
                for name, fact in collect_facts(build, shard_reports).items()
            },
        },
        seen=tuple(
            SeenPart.of(Artefact(**seen_file) for seen_file in report["users"]["seen"])
            for report in shard_reports
            if report["users"].get("seen")
        ),
        filters=_named_filters(config, bundle, shard_reports),
        events=_events_read(config, begin_report),
        format=manifest_format_of(config, bundle),
    )
    build.store.write(manifest_path, manifest.to_bytes())
    return manifest


def _manifest_model(entry: ModelEntry) -> Model:
    int8_entry, weights_entry = entry["int8"], entry.get("weights")
    return Model(
        name=entry["name"],
        fp32=Artefact(**entry["fp32"]),
        int8=None if int8_entry is None else Artefact(**int8_entry),
        digest=entry["digest"],
        spec=entry["spec"],
        agreement=entry["agreement"],
        weights=None if weights_entry is None else Artefact(**weights_entry),
    )


def _events_read(config: NightConfig, event_fields: EventFields) -> IncludedEvents | None:
    if not (events_entry := event_fields.get("events")):
        return None
    attribute_by_facet = {name: facet.attribute for name, facet in config.facets.items()}
    # The namespace as `begin` noted it: a position counts in the stream that it was read from, even if settings have
    # changed.
    events_namespace = event_fields["events_namespace"]
    other_namespace = "" if events_namespace == config.namespace else events_namespace
    return IncludedEvents(events_entry["until"], config.history_limit, attribute_by_facet, other_namespace)


def manifest_format_of(config: NightConfig, bundle: Bundle) -> int:
    """Return the oldest version of the manifest that can express the settings."""
    if config.events.enabled:
        return FORMAT_WITH_EVENTS
    if config.filters or config.facets:
        return FORMAT_WITH_FILTERS
    if config.sources.item_attributes:
        return FORMAT_WITH_ATTRIBUTES
    return FORMAT_WITH_WEIGHTS if bundle.has_weights else MANIFEST_FORMAT


def scoring_seconds(shard_reports: Sequence[ShardReport]) -> float:
    """Return the seconds during which at least one shard was being scored."""
    busy_seconds, covered_until = 0.0, 0.0
    for began_at, ended_at in sorted((report["began_at"], report["ended_at"]) for report in shard_reports):
        busy_seconds += max(0.0, ended_at - max(began_at, covered_until))
        covered_until = max(covered_until, ended_at)
    return busy_seconds


def _entity_set(set_name: Any, hash_seed: int, part_entries: Sequence[FileEntry]) -> EntitySet:
    directory_parts = tuple(
        DirectoryPart(first_hash(shard, len(part_entries)), part_entry["size_bytes"] // 8, Artefact(**part_entry))
        for shard, part_entry in enumerate(part_entries)
    )
    return EntitySet(set_name, hash_seed, sum(part_entry.count for part_entry in directory_parts), directory_parts)


def _manifest_tables(config: NightConfig, bundle: Bundle, shard_reports: Sequence[ShardReport]) -> dict[str, Table]:
    return {
        table_name: _manifest_table(config, bundle, shard_reports, table_name, table_config)
        for table_name, table_config in configured_tables(config, bundle).items()
    }


def _facet_entity_set(facet_name: str, facet: FacetEntry) -> EntitySet:
    value_count = facet["table"]["count"]
    directory_part = DirectoryPart(0, value_count, Artefact(**facet["directory"]))
    return EntitySet(f"{FACET_PREFIX}{facet_name}", facet["seed"], value_count, (directory_part,))


def _facet_table(config: NightConfig, facet_name: str, pages_entry: PagesEntry) -> Table:
    layout = facet_layout(config.facets[facet_name].k)
    records_a_page, record_count = records_per_page(layout, config.page_bytes), pages_entry["count"]
    pages_file, sums_file = Artefact(**pages_entry["file"]), Artefact(**pages_entry["sums"])
    table_parts = (TablePart(0, -(-record_count // records_a_page), record_count, pages_file, sums_file),)
    return Table(facet_name, f"{FACET_PREFIX}{facet_name}", Producer("none"), layout, records_a_page, table_parts, ())


def _named_filters(config: NightConfig, bundle: Bundle, shard_reports: Sequence[ShardReport]) -> dict[str, NamedFilter]:
    tables_by_filter: dict[str, dict[str, Table]] = {name: {} for name in config.filters}
    for name, (table_name, filter_name) in config.table_and_filter_by_name.items():
        tables_by_filter[filter_name][table_name] = _manifest_table(
            config, bundle, shard_reports, name, config.tables[table_name]
        )
    return {
        name: NamedFilter(filter_config.filter, tables_by_filter[name])
        for name, filter_config in config.filters.items()
    }


def _manifest_table(
    config: NightConfig,
    bundle: Bundle,
    shard_reports: Sequence[ShardReport],
    table_name: str,
    table_config: TableConfig,
) -> Table:
    entity, layout = entity_of(bundle, table_name, table_config), layout_of(bundle, table_config)
    records_a_page = records_per_page(layout, config.page_bytes)
    table_parts, first_page = [], 0
    for shard_report in shard_reports:
        pages_entry = (shard_report["users"] if entity == "user" else shard_report["items"])["tables"][table_name]
        page_count = -(-pages_entry["count"] // records_a_page)
        table_parts.append(
            TablePart(
                first_page,
                page_count,
                pages_entry["count"],
                Artefact(**pages_entry["file"]),
                Artefact(**pages_entry["sums"]),
            )
        )
        first_page += page_count
    labels = bundle.value_models[str(table_config.value)].labels if table_config.kind == "value" else ()
    producer = producer_of(bundle, table_config)
    return Table(table_name, entity, producer, layout, records_a_page, tuple(table_parts), tuple(labels))
