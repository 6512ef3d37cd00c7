"""The seal of a generation: its manifest, from the reports of the steps."""

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
from precompute.builds.build import (
    Build,
    attribute_paths,
    cut_of,
    fetch_items,
    open_bundle,
)
from precompute.builds.reports import (
    ASSEMBLE,
    BEGIN,
    EMBED_ITEMS,
    INDEX,
    QUANTIZE,
    FacetEntry,
    FileEntry,
    ModelEntry,
    PagesEntry,
    ShardReport,
    file_entry,
    shard_report,
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
from precompute.sources.unusable import UNKNOWN_NAMED, merged

WITHOUT_INTERACTIONS = "without_interactions"
"""Fact of a generation whose night was given no table of interactions; no other has it."""

WRITERS = {
    FORMAT_WITH_WEIGHTS: "a night of a model with weights beside its file writes",
    FORMAT_WITH_ATTRIBUTES: "a night of items with attributes writes",
    FORMAT_WITH_FILTERS: "a night of declared filters or facets writes",
    FORMAT_WITH_EVENTS: "a night of fresh events writes",
}
"""Manifest version above the first -> words for the nights that write it."""

FactsOf = Callable[[Build, Sequence[ShardReport]], Mapping[str, Any]]
"""Function that returns one feature's facts for the manifest, from a build and the reports of its shards."""


def seal(build: Build, features: Iterable[FactsOf]) -> Manifest:
    """Write the manifest from the steps' reports, with the facts of the `features`; once written it stays."""
    path = generation_path(build.generation, "manifest.json")
    if (sealed := build.store.read(path)) is not None:
        return Manifest.from_bytes(sealed)
    config, bundle = build.config, open_bundle(build)
    begin_report, embed_report = build.need(BEGIN), build.need(EMBED_ITEMS)
    build.need(ASSEMBLE)
    index_report, quantize_report = build.need(INDEX), build.need(QUANTIZE)
    reports = [build.need(shard_report(shard)) for shard in range(config.shards)]
    fetch_items(build)
    attributes = begin_report.get("attributes", {})
    facets = begin_report.get("facets") or embed_report.get("facets") or {}
    for file in (catalogue.VECTORS, *attribute_paths(attributes)):
        build.fetch(file)
    build.fetch("defaults.json")
    manifest = Manifest(
        namespace=config.namespace,
        generation=build.generation,
        data_until=cut_of(build.generation),
        created_at=int(time.time()),
        bundle_digest=begin_report["bundle_digest"],
        inputs_digest=begin_report["inputs_digest"],
        entity_sets={
            "user": _entity_set(
                "user", begin_report["user_seed"], [report["users"]["directory"] for report in reports]
            ),
            "item": _entity_set("item", begin_report["item_seed"], [
                file_entry(build.describe(catalogue.directory_file("item", shard))) for shard in range(config.shards)
            ]),
        }
        | {f"{FACET_PREFIX}{name}": _values(name, facet) for name, facet in facets.items()},
        items=ItemFiles(
            ids=build.describe(catalogue.IDS),
            offsets=build.describe(catalogue.OFFSETS),
            vectors=build.describe(catalogue.VECTORS),
            model_index=build.describe(catalogue.MODEL_INDEX),
            count=begin_report["items"],
            dims=bundle.dims,
            attributes={
                name: Attribute(kind, **{part: build.describe(file) for part, file in files.items()})
                for name, (kind, files) in attributes.items()
            },
        ),
        tables=_tables(config, bundle, reports)
        | {name: _facet(config, name, facet["table"]) for name, facet in facets.items()},
        models={name: _model(entry) for name, entry in quantize_report["models"].items()},
        indexes={
            name: Index(entry["metric"], entry["kind"], Artefact(**entry["file"]), entry["recall"])
            for name, entry in index_report["indexes"].items()
        },
        defaults=build.describe("defaults.json"),
        timings={
            "begin": begin_report["seconds"], "embed_items": embed_report["seconds"],
            "index": index_report["seconds"], "quantize": quantize_report["seconds"],
            "score": scoring_seconds(reports),
        },
        gates=(),  # `verify` adds its verdicts
        facts={
            "users_in_source": begin_report["users"],
            FEATURE_ONLY_USERS_FACT: begin_report.get(FEATURE_ONLY_USERS_FACT, False),
            "users_scored": sum(report["users"]["scored"] for report in reports),
            "users_without_input": sum(report["users"]["without_input"] for report in reports),
            "short_lists": sum(report["users"]["short"] for report in reports),
            "interactions": begin_report["interactions"],
            **({} if config.sources.interactions else {WITHOUT_INTERACTIONS: True}),
            "interactions_with_unknown_items": begin_report["unknown_items"],
            **({UNKNOWN_NAMED: named} if (named := begin_report.get(UNKNOWN_NAMED)) else {}),
            "items_without_vector": begin_report["items_without_vector"],
            HISTORY_LIMIT: config.history_limit,
            "inputs": begin_report["inputs"],
            "unusable": merged([begin_report.get("unusable", {}), *(
                scores.get("unusable", {}) for report in reports for scores in (report["users"], report["items"])
            )]),
            **({"remarks": begin_report["remarks"]} if begin_report.get("remarks") else {}),
            "vocabulary_digest": bundle.vocabulary_digest,
            **{name: fact for facts_of in features for name, fact in facts_of(build, reports).items()},
        },
        seen=tuple(
            SeenPart.of(Artefact(**seen_file) for seen_file in report["users"]["seen"])
            for report in reports if report["users"].get("seen")
        ),
        filters=_filters(config, bundle, reports),
        events=_events(config, begin_report),
        format=manifest_format(config, bundle),
    )  # fmt: skip
    build.store.write(path, manifest.to_bytes())
    return manifest


def _model(entry: ModelEntry) -> Model:
    int8, weights = entry["int8"], entry.get("weights")
    return Model(
        name=entry["name"],
        fp32=Artefact(**entry["fp32"]),
        int8=None if int8 is None else Artefact(**int8),
        digest=entry["digest"],
        spec=entry["spec"],
        agreement=entry["agreement"],
        weights=None if weights is None else Artefact(**weights),
    )


def _events(config: NightConfig, fields: EventFields) -> IncludedEvents | None:
    if not (read := fields.get("events")):
        return None
    facets = {name: facet.attribute for name, facet in config.facets.items()}
    # As `begin` noted it: a position counts in the stream that it was read from, whatever the settings name by now.
    of = fields["events_namespace"]
    namespace = "" if of == config.namespace else of
    return IncludedEvents(read["until"], config.history_limit, facets, namespace)


def manifest_format(config: NightConfig, bundle: Bundle) -> int:
    """Return the oldest version of the manifest that can express the settings."""
    if config.events.enabled:
        return FORMAT_WITH_EVENTS
    if config.filters or config.facets:
        return FORMAT_WITH_FILTERS
    if config.sources.item_attributes:
        return FORMAT_WITH_ATTRIBUTES
    return FORMAT_WITH_WEIGHTS if bundle.has_weights else MANIFEST_FORMAT


def scoring_seconds(reports: Sequence[ShardReport]) -> float:
    """The time in which at least one shard was under way."""
    seconds, covered_until = 0.0, 0.0
    for began_at, ended_at in sorted(
        (report["began_at"], report["ended_at"]) for report in reports
    ):
        seconds += max(0.0, ended_at - max(began_at, covered_until))
        covered_until = max(covered_until, ended_at)
    return seconds


def _entity_set(name: Any, seed: int, parts: Sequence[FileEntry]) -> EntitySet:
    directory_parts = tuple(
        DirectoryPart(first_hash(shard, len(parts)), part["size_bytes"] // 8, Artefact(**part))
        for shard, part in enumerate(parts)
    )
    return EntitySet(name, seed, sum(part.count for part in directory_parts), directory_parts)


def _tables(
    config: NightConfig, bundle: Bundle, reports: Sequence[ShardReport]
) -> dict[str, Table]:
    return {
        name: _table(config, bundle, reports, name, table)
        for name, table in configured_tables(config, bundle).items()
    }


def _values(name: str, facet: FacetEntry) -> EntitySet:
    count = facet["table"]["count"]
    part = DirectoryPart(0, count, Artefact(**facet["directory"]))
    return EntitySet(f"{FACET_PREFIX}{name}", facet["seed"], count, (part,))


def _facet(config: NightConfig, name: str, part: PagesEntry) -> Table:
    layout = facet_layout(config.facets[name].k)
    per_page, count = records_per_page(layout, config.page_bytes), part["count"]
    file, sums = Artefact(**part["file"]), Artefact(**part["sums"])
    parts = (TablePart(0, -(-count // per_page), count, file, sums),)
    return Table(name, f"{FACET_PREFIX}{name}", Producer("none"), layout, per_page, parts, ())


def _filters(
    config: NightConfig, bundle: Bundle, reports: Sequence[ShardReport]
) -> dict[str, NamedFilter]:
    tables_by_filter: dict[str, dict[str, Table]] = {name: {} for name in config.filters}
    for name, (table, filter_) in config.filtered.items():
        tables_by_filter[filter_][table] = _table(
            config, bundle, reports, name, config.tables[table]
        )
    return {
        name: NamedFilter(filter_config.filter, tables_by_filter[name])
        for name, filter_config in config.filters.items()
    }


def _table(
    config: NightConfig,
    bundle: Bundle,
    reports: Sequence[ShardReport],
    name: str,
    table: TableConfig,
) -> Table:
    entity, layout = entity_of(bundle, name, table), layout_of(bundle, table)
    per_page = records_per_page(layout, config.page_bytes)
    parts, page = [], 0
    for report in reports:
        part = (report["users"] if entity == "user" else report["items"])["tables"][name]
        pages = -(-part["count"] // per_page)
        parts.append(
            TablePart(
                page, pages, part["count"], Artefact(**part["file"]), Artefact(**part["sums"])
            )
        )
        page += pages
    labels = bundle.values[str(table.value)].labels if table.kind == "value" else ()
    producer = producer_of(bundle, table)
    return Table(name, entity, producer, layout, per_page, tuple(parts), tuple(labels))
