"""Build of a generation: where its files and its work files lie while the night makes it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import orjson

from cache.errors import BundleError, StoreError, UnknownGeneration
from cache.format.manifest import CUT_CHARS, Model
from cache.format.manifest_files import Artefact
from cache.formats import FIELD, FORMATS, STAGES, demand, stamp
from cache.store.artefacts import ArtefactStore, describe, generation_path, write_atomically
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.bundles.digests import demand_sha256
from precompute.config.settings import NightConfig
from precompute.erasures.erasure import ErasedEntities, all_erasures
from precompute.partitions import catalogue
from precompute.partitions.shard_files import kinds_of
from precompute.releases.cuts import CUT_FORMAT


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A small report, atomically; numpy numbers allowed."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2
    write_atomically(path, orjson.dumps(value, option=options))


def generation_id(
    cut: datetime, config: NightConfig, bundle_digest: str, inputs_digest: str
) -> str:
    """`data_until` in UTC and a digest of everything that decides the result: a retry finds its own work."""
    hasher = hashlib.sha256(config.semantic())
    hasher.update(f"|{bundle_digest}|{inputs_digest}".encode())
    if (stages := FORMATS[STAGES].written) > 1:  # a release with other stages begins anew
        hasher.update(f"|stages {stages}".encode())
    return f"{cut.astimezone(UTC):{CUT_FORMAT}}-{hasher.hexdigest()[:12]}"


def cut_of(generation: str) -> int:
    """`data_until` of a generation id, Unix seconds."""
    return int(
        datetime.strptime(generation[:CUT_CHARS], CUT_FORMAT).replace(tzinfo=UTC).timestamp()
    )


def shard_report(shard: int) -> str:
    """Name of the report of a scored shard."""
    return f"shard-{shard:04d}"


@dataclass(frozen=True, slots=True)
class Build:
    """A generation in the making; `root` is this host's folder of it."""

    config: NightConfig
    store: ArtefactStore
    generation: str

    @classmethod
    def of(cls, config: NightConfig, build: Mapping[str, Any]) -> Self:
        """Build from what a step was handed."""
        return cls(config, config.store(), str(build["generation"]))

    @property
    def root(self) -> Path:
        """Local folder of the generation."""
        return self.store.local(generation_path(self.generation))

    def path(self, name: str) -> Path:
        """Local place of a file to be written; its folder exists."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, *names: str) -> None:
        """Hand finished local files to the store."""
        for name in names:
            self.store.put(generation_path(self.generation, name))

    def fetch(self, name: str) -> Path:
        """A file that an earlier step, perhaps on another host, has finished."""
        return self.store.fetch(generation_path(self.generation, name))

    def describe(self, name: str) -> Artefact:
        """Manifest entry of a finished file."""
        return describe(self.root, name)

    def report(self, name: str, value: Mapping[str, Any]) -> None:
        """Finish a step: its report is written last, so it proves that the files before it are whole."""
        write_json(self.path(f"work/{name}.json"), {**value, **stamp(STAGES)})
        self.finish(f"work/{name}.json")

    def read_report(self, name: str) -> dict[str, Any] | None:
        """A step's report, None when the step has not finished; a store that does not answer raises StoreError."""
        raw = self.store.read(generation_path(self.generation, f"work/{name}.json"))
        if raw is None:
            return None
        report: dict[str, Any] = orjson.loads(raw)
        demand(STAGES, report.pop(FIELD, 1), f"work/{name}.json of {self.generation}")
        return report

    def need(self, name: str) -> dict[str, Any]:
        """A report that must be there."""
        report = self.read_report(name)
        if report is None:
            if self.generation not in self.store.names("generations"):
                raise UnknownGeneration(
                    f"{self.generation} is unknown in {self.store.url}: `status` lists what there is",
                    generation=self.generation,
                )
            raise StoreError(f"{self.generation}: step {name!r} has not finished; run it first")
        return report


def open_bundle(build: Build) -> Bundle:
    """The bundle as `begin` pinned it into the generation."""
    begin_report = build.need("begin")
    for name in begin_report["bundle_files"]:
        build.fetch(f"bundle/{name}")
    bundle = Bundle.read(build.root / "bundle")
    if bundle.digest != begin_report["bundle_digest"]:
        raise BundleError(
            f"the bundle of {build.generation} has digest {bundle.digest}, `begin` pinned "
            f"{begin_report['bundle_digest']}"
        )
    return bundle


def fetch_model(build: Build, model: BundleModel) -> Path:
    """A model's own ONNX file, its weights beside it; raises BundleError when they are not those that `begin` tried."""
    paths = [build.fetch(name) for _, name, _ in model.files]
    for path, (_, _, sha256) in zip(paths, model.files, strict=True):
        demand_sha256(path, sha256)
    return paths[0]


def erased_from(build: Build) -> ErasedEntities:
    """Erased entities that `begin` left out of this build."""
    numbers = set(build.need("begin").get("erased", ()))
    return ErasedEntities.of(
        erasure for erasure in all_erasures(build.store) if erasure.number in numbers
    )


def model_entry(
    build: Build, bundle: Bundle, name: str, int8: bool, agreement: Mapping[str, Any]
) -> Model:
    """A bundle's model as the manifest lists it."""
    source = next(bundle_model for bundle_model in bundle.models if bundle_model.name == name)
    fp32, *weights = [build.describe(file_name) for _, file_name, _ in source.files]
    return Model(
        name=name,
        fp32=fp32,
        weights=weights[0] if weights else None,
        int8=build.describe(f"models/{name}.int8.onnx") if int8 else None,
        digest=source.digest,
        spec=source.spec.to_json(),
        agreement=agreement,
    )


def fetch_items(build: Build) -> None:
    """The catalogue's files, all but the vectors."""
    names = [catalogue.IDS, catalogue.OFFSETS, catalogue.MODEL_INDEX]
    names += [catalogue.directory_file("item", shard) for shard in range(build.config.shards)]
    for name in names:
        build.fetch(name)


def fetch_partition(build: Build, shard: int) -> None:
    """A shard's partition of the sources."""
    for kind in kinds_of(build.need("begin")):
        build.fetch(f"work/partition/{shard:04d}.{kind}")
