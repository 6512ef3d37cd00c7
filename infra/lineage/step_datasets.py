"""Datasets that each step of a night reads and writes, from what the steps wrote down themselves.

A dataset is the same every night, so its name has no generation: that is its version, and the files of this night are
its location.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cache.format.manifest import Manifest
from cache.format.redis_keys import KEYSPACE_VERSION
from cache.store.artefacts import generation_path
from infra.lineage.naming import DatasetName
from precompute.builds.build import Build, shard_report
from precompute.partitions import catalogue

SOURCES: Final = ("interactions", "user_features", "item_features", "user_vectors", "item_vectors")
"""Sources of a night, as `[sources]` and the counts of unusable rows name them."""


@dataclass(frozen=True, slots=True)
class Check:
    """A rule and what came of it; `blocks`: a night that fails it is not published."""

    rule: str
    is_passed: bool
    value: object
    threshold: object
    note: str = ""
    blocks: bool = True


@dataclass(frozen=True, slots=True)
class StepDataset:
    """Dataset that a step reads or writes; what nobody counted is None. `location`: where this version of it lies."""

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
class Ended:
    """A step that ended: the generation that it is about, its shard, and what it returned, as far as they are known."""

    made: Build
    shard: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict)

    def part(self, *names: str, **counted: Any) -> StepDataset:
        """Part of the generation, such as a table."""
        url, generation = self.made.store.url, self.made.generation
        return StepDataset(
            DatasetName.of_url(url, "generations", *names), generation,
            DatasetName.of_url(url, generation_path(generation), *names), **counted,
        )  # fmt: skip

    def report(self, name: str) -> Mapping[str, Any]:
        """A step's report; empty if it wrote none."""
        return self.made.read_report(name) or {}

    @property
    def bundle(self) -> StepDataset:
        """The model bundle as `begin` pinned it."""
        return self.part("bundle", files=len(self.report("begin").get("bundle_files", ())) or None)

    @property
    def vectors(self) -> StepDataset:
        """Vectors of all items, float32."""
        found = self.report("embed_items")
        rows, dims = found.get("items"), found.get("dims")
        size_bytes = rows * dims * 4 if rows and dims else None
        return self.part(catalogue.VECTORS, rows=rows, size_bytes=size_bytes)

    @property
    def manifest(self) -> Manifest | None:
        """The sealed manifest; None before `load`."""
        raw = self.made.store.read(generation_path(self.made.generation, "manifest.json"))
        return None if raw is None else Manifest.from_bytes(raw)

    def in_redis(self, name: str, key: str, **counted: Any) -> StepDataset:
        """Keys of this generation in Redis: `name` is that of all nights, `key` that of this one."""
        url = str(self.made.config.redis_url)
        return StepDataset(
            DatasetName.of_redis(url, name), self.made.generation, DatasetName.of_redis(url, key),
            **counted,
        )  # fmt: skip


def datasets_of(step: str, ended: Ended) -> StepDatasets:
    """Datasets of a step that ended; of one that knows none, such as `retire`, nothing."""
    look = _LOOKS.get(step)
    return StepDatasets() if look is None else look(ended)


def _take_events(ended: Ended) -> StepDatasets:
    config = ended.made.config
    name = DatasetName.of_redis(config.events_redis, config.keyspace().events)
    rows, until = ended.found.get("events"), ended.found.get("events_until")
    return StepDatasets(
        (StepDataset(name, until, rows=rows),),
        (StepDataset(DatasetName.of_url(ended.made.store.url, "events"), until, rows=rows),),
    )


def _begin(ended: Ended) -> StepDatasets:
    config, begun = ended.made.config, ended.report("begin")
    inputs = [*_sources(ended, begun)]
    if events := begun.get("events"):
        name = DatasetName.of_url(ended.made.store.url, "events")
        inputs.append(StepDataset(name, events["until"], files=events["files"]))
    if not config.sources.item_vectors:
        name = DatasetName.of_url(str(config.path(config.bundle)))
        inputs.append(StepDataset(name, begun.get("bundle_digest")))
    return StepDatasets(
        tuple(inputs),
        (
            ended.part("items", rows=begun.get("items")),
            ended.part("work/partition", rows=begun.get("users")),
            ended.bundle,
        ),
    )


def _sources(ended: Ended, begun: Mapping[str, Any]) -> Iterator[StepDataset]:
    """Sources, with their rows where one file or pattern has all of them, and what was left out of them."""
    config = ended.made.config
    for kind in SOURCES:
        found: Any = getattr(config.sources, kind)
        patterns = [found] if isinstance(found, str) else [*(found or ())]
        counted = begun.get("unusable", {}).get(kind, {})
        left_out = tuple(
            Check(f"usable: {reason}", False, each["rows"], 0, blocks=False)
            for reason, each in counted.get("reasons", {}).items()
        )
        for pattern in patterns:
            rows = counted.get("rows") if len(patterns) == 1 else None
            name = DatasetName.of_pattern(pattern, str(config.path(".").absolute()))
            yield StepDataset(name, rows=rows, checks=left_out)


def _embed_items(ended: Ended) -> StepDatasets:
    rows = ended.report("begin").get("items")
    return StepDatasets((ended.part("items", rows=rows), ended.bundle), (ended.vectors,))


def _score(ended: Ended) -> StepDatasets:
    found = ended.report(shard_report(ended.shard or 0))
    users, items = found.get("users", {}), found.get("items", {})
    tables = {**users.get("tables", {}), **items.get("tables", {})}
    written = tuple(
        ended.part(
            "tables", name, rows=each["count"], size_bytes=each["file"]["size_bytes"], files=1
        )
        for name, each in tables.items()
    )
    read = ended.part("work/partition", rows=users.get("entities"))
    return StepDatasets((read, ended.vectors, ended.bundle), written)


def _assemble(ended: Ended) -> StepDatasets:
    reports = [ended.report(shard_report(shard)) for shard in range(ended.made.config.shards)]
    names = {
        name
        for each in reports
        for kind in ("users", "items")
        for name in each.get(kind, {}).get("tables", ())
    }
    rows = ended.report("assemble").get("users_scored")
    read = tuple(ended.part("tables", name) for name in sorted(names))
    return StepDatasets(read, (ended.part(rows=rows),))


def _index(ended: Ended) -> StepDatasets:
    written = tuple(
        ended.part(each["file"]["path"], size_bytes=each["file"]["size_bytes"], files=1)
        for each in ended.report("index").get("indexes", {}).values()
    )
    return StepDatasets((ended.vectors,), written)


def _quantize(ended: Ended) -> StepDatasets:
    models = ended.report("quantize").get("models", {})
    files = [each for model in models.values() for each in (model["fp32"], model["int8"]) if each]
    size_bytes = sum(each["size_bytes"] for each in files)
    written = ended.part("models", size_bytes=size_bytes, files=len(files))
    return StepDatasets((ended.bundle,), (written,) if files else ())


def _load(ended: Ended) -> StepDatasets:
    manifest = ended.manifest
    return StepDatasets(_tables(ended, manifest), _pages(ended, manifest))


def _verify(ended: Ended) -> StepDatasets:
    manifest = ended.manifest
    gates = () if manifest is None else manifest.gates
    return StepDatasets((ended.part(checks=tuple(map(_check, gates))), *_pages(ended, manifest)))


def _publish(ended: Ended) -> StepDatasets:
    live = ended.made.config.keyspace().live
    return StepDatasets(_pages(ended, ended.manifest), (ended.in_redis(live, live),))


def _warm(ended: Ended) -> StepDatasets:
    live = ended.made.config.keyspace().live
    return StepDatasets((ended.in_redis(live, live),))


def _check(gate: Mapping[str, Any]) -> Check:
    note = f"{gate.get('note', '')} {gate.get('overridden', '')}".strip()
    return Check(gate["rule"], gate["passed"], gate["value"], gate["threshold"], note)


def _tables(ended: Ended, manifest: Manifest | None) -> tuple[StepDataset, ...]:
    return tuple(ended.part("tables", name, **counted) for name, counted in _counted(manifest))


def _pages(ended: Ended, manifest: Manifest | None) -> tuple[StepDataset, ...]:
    generation, before = (
        ended.made.generation,
        f"larder:{KEYSPACE_VERSION}:{ended.made.config.namespace}:g",
    )
    return tuple(
        ended.in_redis(f"{before}:{name}", f"{before}:{generation}:{name}", **counted)
        for name, counted in _counted(manifest)
    )


def _counted(manifest: Manifest | None) -> Iterable[tuple[str, Mapping[str, int]]]:
    for name, table in ({} if manifest is None else manifest.stored).items():
        yield (
            name,
            {
                "rows": sum(part.count for part in table.parts),
                "size_bytes": sum(part.file.size_bytes for part in table.parts),
            },
        )


_LOOKS: Final[Mapping[str, Callable[[Ended], StepDatasets]]] = {
    "take_events": _take_events, "begin": _begin, "embed_items": _embed_items, "score": _score,
    "assemble": _assemble, "index": _index, "quantize": _quantize, "load": _load,
    "verify": _verify, "publish": _publish, "warm": _warm,
}  # fmt: skip
