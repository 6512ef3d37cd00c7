"""Datasets that each step of a night reads and writes, named by OpenLineage's specification.

A dataset has the same name every night. The generation is its version, and the files of the night are its location.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final, Self

from redis.connection import parse_url

from cache.format.manifest import Manifest
from cache.format.redis_keys import KEYSPACE_VERSION
from cache.l2.sentinel import is_sentinel, read_sentinel_url
from cache.l2.slots import is_cluster, seed_urls
from cache.store.artefacts import generation_path
from cache.store.object_store import without_secrets
from precompute.builds.build import Build
from precompute.builds.reports import (
    ASSEMBLE_REPORT,
    BEGIN_REPORT,
    EMBED_ITEMS_REPORT,
    INDEX_REPORT,
    QUANTIZE_REPORT,
    BeginReport,
    PagesEntry,
    ReportName,
    ReportT,
    ShardReport,
    shard_report_name,
)
from precompute.partitions import catalogue

SOURCE_NAMES: Final = ("interactions", "user_features", "item_features", "user_vectors", "item_vectors")
"""Names of a night's sources, in `[sources]` and in the counts of unusable rows."""

REDIS_PORT = 6379

_AZURE_CONTAINER_PATTERN = re.compile(r"abfss?://[^/@:]+@")
"""Pattern of an Azure container in a URL, which precedes the @ as user and password do in other URLs."""


@dataclass(frozen=True, slots=True)
class DatasetName:
    """Name of a dataset: a namespace, such as `s3://bucket` or `file`, and a name within it."""

    namespace: str
    name: str

    @classmethod
    def of_url(cls, url: str, *subpath_parts: str) -> Self:
        """Return the name, without secrets, of the dataset at a URL or absolute path extended by `subpath_parts`."""
        url = _without_query(url)
        azure_match = _AZURE_CONTAINER_PATTERN.match(url)
        prefix_length = azure_match.end() if azure_match else 0
        scheme, _, location_path = f"{url[:prefix_length]}{without_secrets(url[prefix_length:])}".rpartition("://")
        path = PurePosixPath(location_path, *subpath_parts)
        if scheme in ("", "file"):
            return cls("file", str(path))
        return cls(f"{scheme}://{path.parts[0]}", "/".join(path.parts[1:]) or "/")

    @classmethod
    def of_pattern(cls, pattern: str, base_folder: str) -> Self:
        """Return the name of source files: the file, or the folder above the first wildcard.

        Paths are relative to `base_folder`.
        """
        full_pattern = _without_query(pattern) if "://" in pattern else str(PurePosixPath(base_folder, pattern))
        wildcard_free_parts = []
        for part in full_pattern.split("/"):
            if any(wildcard in part for wildcard in "*?["):
                break
            wildcard_free_parts.append(part)
        return cls.of_url("/".join(wildcard_free_parts))

    @classmethod
    def of_redis(cls, url: str, key: str) -> Self:
        """Return the name of the dataset at a key or prefix of keys; it begins with the database's number.

        The namespace has the address of the first node or sentinel, and the service name under Sentinel.
        """
        if is_sentinel(url):
            group, connection_options = read_sentinel_url(url)
            host, port = group.sentinel_addresses[0]
            address = f"{host}:{port}/{group.service_name}"
        else:
            connection_options = parse_url(seed_urls(url)[0] if is_cluster(url) else url)  # type: ignore[no-untyped-call]
            address = (
                connection_options.get("path")
                or f"{connection_options.get('host', 'localhost')}:{connection_options.get('port', REDIS_PORT)}"
            )
        return cls(f"redis://{address}", f"{connection_options.get('db', 0)}/{key}")


def _without_query(url: str) -> str:
    """Remove the query from an HTTP URL; in other URLs and paths `?` is a wildcard."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a rule; `blocks` is True if a night that fails the rule is not published."""

    gate_rule: str
    is_passed: bool
    measured_value: object
    threshold: object
    note: str = ""
    blocks: bool = True


@dataclass(frozen=True, slots=True)
class StepDataset:
    """Dataset that a step reads or writes; `location` is where this version is stored; unknown counts are None."""

    name: DatasetName
    version: str | None = None
    location: DatasetName | None = None
    rows: int | None = None
    size_bytes: int | None = None
    files: int | None = None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDatasets:
    """Inputs and outputs of one step."""

    inputs: tuple[StepDataset, ...] = ()
    outputs: tuple[StepDataset, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Finished step with its generation, its shard (None if it has none) and its result (empty if unknown)."""

    build: Build
    shard: int | None = None
    step_result: Mapping[str, Any] = field(default_factory=dict)

    def part(self, *path_names: str, **dataset_fields: Any) -> StepDataset:
        """Return the dataset of a part of the generation, such as a table."""
        url, generation = self.build.store.url, self.build.generation
        return StepDataset(
            DatasetName.of_url(url, "generations", *path_names), generation,
            DatasetName.of_url(url, generation_path(generation), *path_names), **dataset_fields,
        )  # fmt: skip

    def report(self, name: ReportName[ReportT]) -> ReportT | None:
        """Return a step's report, or None if the step wrote none."""
        return self.build.read_report(name)

    @property
    def bundle(self) -> StepDataset:
        """Return the dataset of the model bundle that `begin` copied into the generation."""
        begin_report = self.report(BEGIN_REPORT)
        files = None if begin_report is None else len(begin_report["bundle_files"])
        return self.part("bundle", files=files)

    @property
    def vectors(self) -> StepDataset:
        """Return the dataset of all item vectors, which are float32."""
        embed_report = self.report(EMBED_ITEMS_REPORT)
        if embed_report is None:
            return self.part(catalogue.ITEM_VECTORS_FILE)
        rows, dims = embed_report["items"], embed_report["dims"]
        return self.part(catalogue.ITEM_VECTORS_FILE, rows=rows, size_bytes=rows * dims * 4)

    @property
    def manifest(self) -> Manifest | None:
        """Return the generation's manifest; None until `load` has written it."""
        raw = self.build.store.read(generation_path(self.build.generation, "manifest.json"))
        return None if raw is None else Manifest.from_bytes(raw)

    def in_redis(self, stable_key: str, generation_key: str, **dataset_fields: Any) -> StepDataset:
        """Return a dataset in Redis, named by `stable_key`, the same every night, and located at `generation_key`."""
        url = str(self.build.config.redis_url)
        return StepDataset(
            DatasetName.of_redis(url, stable_key), self.build.generation, DatasetName.of_redis(url, generation_key),
            **dataset_fields,
        )  # fmt: skip


def list_step_datasets(step_name: str, finished_step: FinishedStep) -> StepDatasets:
    """Return the datasets of a finished step; empty for a step without any, such as `retire`."""
    list_datasets = _DATASETS_BY_STEP.get(step_name)
    return StepDatasets() if list_datasets is None else list_datasets(finished_step)


def _take_events_datasets(finished_step: FinishedStep) -> StepDatasets:
    config = finished_step.build.config
    stream_name = DatasetName.of_redis(config.events_redis_url, config.keyspace().events)
    event_count, events_until = (finished_step.step_result.get("events"), finished_step.step_result.get("events_until"))
    return StepDatasets(
        (StepDataset(stream_name, events_until, rows=event_count),),
        (StepDataset(DatasetName.of_url(finished_step.build.store.url, "events"), events_until, rows=event_count),),
    )


def _begin_datasets(finished_step: FinishedStep) -> StepDatasets:
    config, begin_report = finished_step.build.config, finished_step.report(BEGIN_REPORT)
    input_datasets = [*_source_datasets(finished_step, begin_report)]
    if begin_report is not None and "events" in begin_report:
        events = begin_report["events"]
        dataset_name = DatasetName.of_url(finished_step.build.store.url, "events")
        input_datasets.append(StepDataset(dataset_name, events["until"], files=events["files"]))
    if not config.sources.item_vectors:
        dataset_name = DatasetName.of_url(str(config.path(config.bundle)))
        bundle_digest = None if begin_report is None else begin_report["bundle_digest"]
        input_datasets.append(StepDataset(dataset_name, bundle_digest))
    return StepDatasets(
        tuple(input_datasets),
        (
            finished_step.part("items", rows=begin_report and begin_report["items"]),
            finished_step.part("work/partition", rows=begin_report and begin_report["users"]),
            finished_step.bundle,
        ),
    )


def _source_datasets(finished_step: FinishedStep, begin_report: BeginReport | None) -> Iterator[StepDataset]:
    """Yield the sources, with row counts if one file or pattern has all rows, and checks on rows left out."""
    config = finished_step.build.config
    unusable_by_source = {} if begin_report is None else begin_report["unusable"]
    for source_name in SOURCE_NAMES:
        source_setting: Any = getattr(config.sources, source_name)
        patterns = [source_setting] if isinstance(source_setting, str) else [*(source_setting or ())]
        source_report = unusable_by_source.get(source_name)
        left_out_checks = tuple(
            Check(f"usable: {reason}", False, reason_counts["rows"], 0, blocks=False)
            for reason, reason_counts in (source_report["reasons"] if source_report else {}).items()
        )
        for pattern in patterns:
            row_count = source_report["rows"] if source_report and len(patterns) == 1 else None
            dataset_name = DatasetName.of_pattern(pattern, str(config.path(".").absolute()))
            yield StepDataset(dataset_name, rows=row_count, checks=left_out_checks)


def _embed_items_datasets(finished_step: FinishedStep) -> StepDatasets:
    begin_report = finished_step.report(BEGIN_REPORT)
    items = finished_step.part("items", rows=begin_report and begin_report["items"])
    return StepDatasets((items, finished_step.bundle), (finished_step.vectors,))


def _score_datasets(finished_step: FinishedStep) -> StepDatasets:
    score_report = finished_step.report(shard_report_name(finished_step.shard or 0))
    if score_report is None:
        return StepDatasets((finished_step.part("work/partition"), finished_step.vectors, finished_step.bundle))
    users_report, tables = score_report["users"], _tables_of_shard(score_report)
    table_datasets = tuple(
        finished_step.part(
            "tables", table_name, rows=table_report["count"], size_bytes=table_report["file"]["size_bytes"], files=1
        )
        for table_name, table_report in tables.items()
    )
    partition_dataset = finished_step.part("work/partition", rows=users_report["entities"])
    return StepDatasets((partition_dataset, finished_step.vectors, finished_step.bundle), table_datasets)


def _tables_of_shard(score_report: ShardReport) -> dict[str, PagesEntry]:
    return {**score_report["users"]["tables"], **score_report["items"]["tables"]}


def _assemble_datasets(finished_step: FinishedStep) -> StepDatasets:
    reports = [finished_step.report(shard_report_name(shard)) for shard in range(finished_step.build.config.shards)]
    table_names = {table_name for report in reports if report is not None for table_name in _tables_of_shard(report)}
    assemble_report = finished_step.report(ASSEMBLE_REPORT)
    user_count = assemble_report and assemble_report["users_scored"]
    table_datasets = tuple(finished_step.part("tables", table_name) for table_name in sorted(table_names))
    return StepDatasets(table_datasets, (finished_step.part(rows=user_count),))


def _index_datasets(finished_step: FinishedStep) -> StepDatasets:
    index_report = finished_step.report(INDEX_REPORT)
    indexes = {} if index_report is None else index_report["indexes"]
    index_datasets = tuple(
        finished_step.part(entry["file"]["path"], size_bytes=entry["file"]["size_bytes"], files=1)
        for entry in indexes.values()
    )
    return StepDatasets((finished_step.vectors,), index_datasets)


def _quantize_datasets(finished_step: FinishedStep) -> StepDatasets:
    quantize_report = finished_step.report(QUANTIZE_REPORT)
    models = {} if quantize_report is None else quantize_report["models"]
    model_files = [
        model_file for model in models.values() for model_file in (model["fp32"], model["int8"]) if model_file
    ]
    size_bytes = sum(model_file["size_bytes"] for model_file in model_files)
    models_dataset = finished_step.part("models", size_bytes=size_bytes, files=len(model_files))
    return StepDatasets((finished_step.bundle,), (models_dataset,) if model_files else ())


def _load_datasets(finished_step: FinishedStep) -> StepDatasets:
    manifest = finished_step.manifest
    return StepDatasets(_table_datasets(finished_step, manifest), _page_datasets(finished_step, manifest))


def _verify_datasets(finished_step: FinishedStep) -> StepDatasets:
    manifest = finished_step.manifest
    gates = () if manifest is None else manifest.gates
    return StepDatasets(
        (finished_step.part(checks=tuple(map(_gate_check, gates))), *_page_datasets(finished_step, manifest))
    )


def _publish_datasets(finished_step: FinishedStep) -> StepDatasets:
    live_key = finished_step.build.config.keyspace().live
    return StepDatasets(
        _page_datasets(finished_step, finished_step.manifest), (finished_step.in_redis(live_key, live_key),)
    )


def _warm_datasets(finished_step: FinishedStep) -> StepDatasets:
    live_key = finished_step.build.config.keyspace().live
    return StepDatasets((finished_step.in_redis(live_key, live_key),))


def _gate_check(gate: Mapping[str, Any]) -> Check:
    note = f"{gate.get('note', '')} {gate.get('overridden', '')}".strip()
    return Check(gate["rule"], gate["passed"], gate["value"], gate["threshold"], note)


def _table_datasets(finished_step: FinishedStep, manifest: Manifest | None) -> tuple[StepDataset, ...]:
    return tuple(
        finished_step.part("tables", table_name, **table_totals)
        for table_name, table_totals in _totals_by_table(manifest)
    )


def _page_datasets(finished_step: FinishedStep, manifest: Manifest | None) -> tuple[StepDataset, ...]:
    generation, key_prefix = (
        finished_step.build.generation,
        f"larder:{KEYSPACE_VERSION}:{finished_step.build.config.namespace}:g",
    )
    return tuple(
        finished_step.in_redis(f"{key_prefix}:{table_name}", f"{key_prefix}:{generation}:{table_name}", **table_totals)
        for table_name, table_totals in _totals_by_table(manifest)
    )


def _totals_by_table(manifest: Manifest | None) -> Iterable[tuple[str, Mapping[str, int]]]:
    for table_name, table in ({} if manifest is None else manifest.stored_tables).items():
        yield (
            table_name,
            {
                "rows": sum(part.count for part in table.parts),
                "size_bytes": sum(part.file.size_bytes for part in table.parts),
            },
        )


_DATASETS_BY_STEP: Final[Mapping[str, Callable[[FinishedStep], StepDatasets]]] = {
    "take_events": _take_events_datasets,
    "begin": _begin_datasets,
    "embed_items": _embed_items_datasets,
    "score": _score_datasets,
    "assemble": _assemble_datasets,
    "index": _index_datasets,
    "quantize": _quantize_datasets,
    "load": _load_datasets,
    "verify": _verify_datasets,
    "publish": _publish_datasets,
    "warm": _warm_datasets,
}
