"""Build of a generation: its id and cut, its files on this host and in the store, and its steps' reports."""

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

import orjson

from cache.errors import BundleError, ConfigError, LarderError, Refused, StoreError, UnknownGeneration
from cache.format.manifest import CUT_CHARS, GENERATION_PATTERN, Artefact
from cache.formats import FORMAT_FIELD, FORMATS, STAGES, demand_readable, version_stamp
from cache.store.artefacts import COPY_IDLE_S, ArtefactStore, describe_file, generation_path, write_atomically
from cache.store.erasures import all_erasures
from cache.store.releases import all_releases
from precompute.builds.reports import BEGIN_REPORT, AttributeFiles, BuildId, ModelEntry, ReportName, ReportT, file_entry
from precompute.bundles.bundle import Bundle, BundleModel, demand_sha256
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.partitions.shard_files import partition_file_kinds
from precompute.releases.release_log import Releases
from precompute.sources.erasures import ErasedEntities

StepParameters = ParamSpec("StepParameters")
StepResult = TypeVar("StepResult")

CUT_FORMAT: Final = "%Y%m%dT%H%M%SZ"
"""Format of the cut (UTC) at the start of a generation id, so that ids sort by age of their data."""

CLOCK_AHEAD_S_MAX: Final = 300.0
"""Seconds by which a chosen cut may be ahead of Redis' clock, since clocks of hosts differ."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build of a generation; `root` is its folder on this host."""

    config: NightConfig
    store: ArtefactStore
    generation: str

    @classmethod
    def of(cls, config: NightConfig, build: BuildId) -> Self:
        """Create the build from the value that steps pass on."""
        return cls(config, config.store(), build["generation"])

    @property
    def root(self) -> Path:
        """Local folder of the generation."""
        return self.store.local(generation_path(self.generation))

    def path(self, file_name: str) -> Path:
        """Return the local path for writing a file; create its folder."""
        local_path = self.root / file_name
        local_path.parent.mkdir(parents=True, exist_ok=True)
        return local_path

    def finish(self, *file_names: str) -> None:
        """Publish finished local files to the store."""
        for file_name in file_names:
            self.store.put(generation_path(self.generation, file_name))

    def fetch(self, file_name: str) -> Path:
        """Fetch a file that an earlier step has finished, perhaps on another host."""
        return self.store.fetch(generation_path(self.generation, file_name))

    def describe(self, file_name: str) -> Artefact:
        """Return the manifest entry of a finished file."""
        return describe_file(self.root, file_name)

    def report(self, report_name: ReportName[ReportT], report: ReportT) -> None:
        """Finish a step by writing its report, the last file: it proves that the step's other files are complete."""
        write_json(self.path(f"work/{report_name}.json"), {**report, **version_stamp(STAGES)})
        self.finish(f"work/{report_name}.json")

    def read_report(self, report_name: ReportName[ReportT]) -> ReportT | None:
        """Return a step's report, None for an unfinished step; raise StoreError if the store does not answer."""
        report_bytes = self.store.read(generation_path(self.generation, f"work/{report_name}.json"))
        if report_bytes is None:
            return None
        report = orjson.loads(report_bytes)
        demand_readable(STAGES, report.pop(FORMAT_FIELD, 1), f"work/{report_name}.json of {self.generation}")
        return cast(ReportT, report)

    def need_report(self, report_name: ReportName[ReportT]) -> ReportT:
        """Return a report that must exist."""
        report = self.read_report(report_name)
        if report is None:
            if self.generation not in self.store.names("generations"):
                raise UnknownGeneration(
                    f"{self.generation} is unknown in {self.store.url}: `status` lists the generations",
                    generation=self.generation,
                )
            raise StoreError(f"{self.generation}: step {report_name!r} has not finished; run it first")
        return report


def open_bundle(build: Build) -> Bundle:
    """Open the bundle that `begin` copied into the generation."""
    begin_report = build.need_report(BEGIN_REPORT)
    for file_name in begin_report["bundle_files"]:
        build.fetch(f"bundle/{file_name}")
    bundle = Bundle.read(build.root / "bundle")
    if bundle.digest != begin_report["bundle_digest"]:
        raise BundleError(
            f"the bundle of {build.generation} has digest {bundle.digest}, `begin` pinned "
            f"{begin_report['bundle_digest']}"
        )
    return bundle


def fetch_model(build: Build, model: BundleModel) -> Path:
    """Fetch a model's ONNX and weights files; raise BundleError if they differ from those that `begin` checked."""
    local_paths = [build.fetch(name) for _, name, _ in model.files]
    for local_path, (_, _, sha256) in zip(local_paths, model.files, strict=True):
        demand_sha256(local_path, sha256)
    return local_paths[0]


def model_entry(
    build: Build, bundle: Bundle, model_name: str, has_int8: bool, int8_agreement: Mapping[str, Any]
) -> ModelEntry:
    """Return the entry of a bundle's model, for a report and the manifest."""
    source_model = next(bundle_model for bundle_model in bundle.models if bundle_model.name == model_name)
    fp32_entry, *weights_entries = [file_entry(build.describe(file_name)) for _, file_name, _ in source_model.files]
    return {
        "name": model_name,
        "fp32": fp32_entry,
        "int8": file_entry(build.describe(f"models/{model_name}.int8.onnx")) if has_int8 else None,
        "digest": source_model.digest,
        "spec": source_model.spec.to_json(),
        "agreement": int8_agreement,
        "weights": weights_entries[0] if weights_entries else None,
    }


def fetch_catalogue(build: Build) -> None:
    """Fetch the catalogue's files, all but the vectors."""
    file_names = [catalogue.ITEM_IDS_FILE, catalogue.ITEM_OFFSETS_FILE, catalogue.MODEL_INDEX_FILE]
    file_names += [catalogue.directory_file_path("item", shard) for shard in range(build.config.shards)]
    for file_name in file_names:
        build.fetch(file_name)


def fetch_partition(build: Build, shard: int) -> None:
    """Fetch a shard's partition of the sources."""
    for file_kind in partition_file_kinds(build.need_report(BEGIN_REPORT).get("user_vectors", False)):
        build.fetch(f"work/partition/{shard:04d}.{file_kind}")


def read_erased_entities(build: Build) -> ErasedEntities:
    """Return the erased entities that `begin` left out of this build."""
    erasure_numbers = set(build.need_report(BEGIN_REPORT).get("erased", ()))
    return ErasedEntities.of(erasure for erasure in all_erasures(build.store) if erasure.number in erasure_numbers)


def generation_id(data_until: datetime, config: NightConfig, bundle_digest: str, inputs_digest: str) -> str:
    """Return the cut in UTC with a digest of all that decides the result, so that a retry continues the same build."""
    digest_hasher = hashlib.sha256(config.semantic_settings_bytes())
    digest_hasher.update(f"|{bundle_digest}|{inputs_digest}".encode())
    if (stages_version := FORMATS[STAGES].written_version) > 1:  # a release with changed stages starts a new build
        digest_hasher.update(f"|stages {stages_version}".encode())
    return f"{data_until.astimezone(UTC):{CUT_FORMAT}}-{digest_hasher.hexdigest()[:12]}"


def settings_digest(config: NightConfig) -> str:
    """Return the digest of the settings that determine a generation's content."""
    return hashlib.sha256(config.semantic_settings_bytes()).hexdigest()


def data_until_of(generation: str) -> int:
    """Return the `data_until` of a generation id, Unix seconds."""
    return int(datetime.strptime(generation[:CUT_CHARS], CUT_FORMAT).replace(tzinfo=UTC).timestamp())


def find_newer_live(releases: Releases, data_until: datetime, *, is_cut_chosen: bool) -> str | None:
    """Return the live generation if it is newer than a default cut; None if the cut can be published.

    Raises ConfigError if a chosen cut could not be published, or would block the publish of later nights. A default cut
    may be ahead of Redis' clock: a scheduler's time is never far ahead, and nights by a wrong clock are better than
    none.
    """
    ahead_s = data_until.timestamp() - releases.clock()
    if is_cut_chosen and ahead_s > CLOCK_AHEAD_S_MAX:
        raise ConfigError(
            f"data_until {data_until.isoformat()} is {ahead_s:,.0f} s ahead of Redis' clock: no later night could be "
            "published until then; give a time in the past",
            field="data_until",
        )
    live_generation = releases.ledger().live_generation
    if live_generation is None or f"{data_until:{CUT_FORMAT}}" >= live_generation[:CUT_CHARS]:
        return None
    if is_cut_chosen:
        raise ConfigError(
            f"data_until {data_until.isoformat()} is older than the live generation {live_generation}, so it could not "
            "be published: give a newer one, or roll back with `larder roll-back`",
            field="data_until",
            live=live_generation,
        )
    return live_generation


def attribute_paths(files_by_attribute: Mapping[str, AttributeFiles]) -> Iterator[str]:
    """Yield the paths of all files of these attributes."""
    for _, path_by_field in files_by_attribute.values():
        yield from path_by_field.values()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a small report atomically; numpy numbers allowed."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2
    write_atomically(path, orjson.dumps(document, option=options))


@contextmanager
def record_step_time(build: Build, step_name: str) -> Iterator[None]:
    """Record the block's start (Unix seconds) and duration if it succeeds; for a step of `STEPS_TIMED_APART`.

    A repeat that finds the work done takes less time, and does not replace the first duration.
    """
    began_at_s, started_at = time.time(), time.perf_counter()
    yield
    duration_s = time.perf_counter() - started_at
    times_path = generation_path(build.generation, f"times/{step_name}.json")
    # times are only displayed, so no error may fail the step
    with suppress(LarderError, OSError, ValueError, TypeError, KeyError):
        earlier_times = build.store.read(times_path)
        if earlier_times is None or float(orjson.loads(earlier_times)["seconds"]) < duration_s:
            times_record = {"began_at": round(began_at_s, 3), "seconds": round(duration_s, 3)}
            build.store.write(times_path, orjson.dumps(times_record))


def with_host_copies(
    step: Callable[Concatenate[NightConfig, BuildId, StepParameters], StepResult],
) -> Callable[Concatenate[NightConfig, BuildId, StepParameters], StepResult]:
    """Wrap a step to first sweep this host's old copies, and to record that it will hold files of its generation.

    If a night of newer data retires the generation meanwhile, the step raises Refused instead of an error about a
    missing file.
    """

    @functools.wraps(step)
    def run_step(
        config: NightConfig, build: BuildId, /, *arguments: StepParameters.args, **options: StepParameters.kwargs
    ) -> StepResult:
        store, generation = config.store(), build["generation"]
        sweep_copies(store, generations_in_use=[generation])
        record_copies(store, generation)
        try:
            return step(config, build, *arguments, **options)
        except (LarderError, FileNotFoundError) as error:
            demand_not_retired(store, generation, error)
            raise

    return run_step


def demand_not_retired(store: ArtefactStore, generation: str, error: Exception) -> None:
    """Raise Refused from `error` if a newer night retired the generation during the step, and so removed its files."""
    try:
        generation_releases = [release for release in all_releases(store) if release.generation == generation]
    except (LarderError, OSError):
        return  # the store does not answer, so the caller raises the original error
    is_retired = bool(generation_releases) and generation_releases[-1].action == "retire"
    if is_retired and GENERATION_PATTERN.fullmatch(
        generation_releases[-1].attempt
    ):  # the attempt of a retire by a night is the night's generation; other retirements are manual
        newer_generation = generation_releases[-1].attempt
        raise Refused(
            f"{generation} was retired during this step by {newer_generation}, which has newer data: nothing remains "
            "to be done",
            rule="retired", value=generation, threshold=newer_generation,
        ) from error  # fmt: skip


def sweep_copies(store: ArtefactStore, *, generations_in_use: Collection[str] = ()) -> None:
    """Remove copies of generations that the store no longer has; ignore a store that does not answer."""
    with contextlib.suppress(StoreError, OSError):
        store.sweep_host_copies(generations_in_use, cutoff_at=time.time() - COPY_IDLE_S)


def record_copies(store: ArtefactStore, generation: str) -> None:
    """Record in a remote store that this host will hold files of a generation."""
    if store.copies is not None:
        store.copies.record(generation)
