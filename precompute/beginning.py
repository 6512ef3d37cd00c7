"""A night's beginning: the generation named, its inputs pinned, its catalogue and partition laid out."""

import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime

import orjson

from cache.artefacts import generation_path, take_file, write_atomically
from cache.errors import (
    BundleError,
    ConfigError,
    Conflict,
    SourceError,
)
from precompute import catalogue
from precompute.build import (
    Build,
    Progress,
    Step,
    generation_id,
    quiet,
)
from precompute.bulk.headroom import writes_files
from precompute.config import NightConfig, parse_time
from precompute.erasures.erasure import Erased, all_erasures
from precompute.gates.holdout import Holdout
from precompute.models.bundle import Bundle
from precompute.models.training import heal
from precompute.releases.adopt import demand_agreement
from precompute.releases.registry import open_releases
from precompute.releases.states import State, demand
from precompute.scoring.partition import partition
from precompute.scoring.shard import (
    configured_tables,
    layout_of,
)
from precompute.scoring.shard_files import KINDS
from precompute.sources import pin, source_files

BUNDLE_COPIES = 3
ERASURE_LOOKS = 10


@writes_files
def begin(
    config: NightConfig,
    *,
    data_until: str | None,
    run_after: str | None,
    progress: Progress = quiet,
) -> Step:
    """Name the generation, pin its inputs, lay out the catalogue and partition the sources by hash range."""
    data_until = data_until or config.data_until
    moment = data_until or run_after
    if moment is None:
        raise ConfigError("a night needs a cut: give data_until, or the scheduler's run_after")
    cut = parse_time(moment)
    if not config.sources.interactions:
        raise ConfigError(
            "sources.interactions is empty: name the files the night is computed from, in the file given by "
            "--config or LARDER_CONFIG"
        )
    with open_releases(config) as releases:  # before hours of work that could not be published
        demand_agreement(releases)
    with _copied_bundle(config) as bundle:
        return _begin(config, bundle, cut, until=moment if data_until else None, progress=progress)


@contextmanager
def _copied_bundle(config: NightConfig) -> Iterator[Bundle]:
    """A private copy of the bundle, whole: everything of the night comes from it, whatever is trained meanwhile."""
    source = config.path(config.bundle)
    # Hidden, so that nothing that lists the store sees it.
    beside = config.store().local(f".bundle.{secrets.token_hex(4)}.part")
    try:
        for left in reversed(range(BUNDLE_COPIES)):
            heal(source)
            if not source.exists() and not left:
                raise ConfigError(
                    f"there is no bundle at {source}: set `bundle`, or run `train` first"
                )
            try:
                shutil.copytree(source, beside)
                copy = Bundle.read(beside)
                copy.verify()
            except (OSError, BundleError) as error:
                # Replaced while it was copied, perhaps: then another copy is whole.
                shutil.rmtree(beside, ignore_errors=True)
                if left:
                    continue
                if isinstance(error, BundleError):
                    raise
                raise BundleError(f"cannot copy the bundle at {source}: {error}") from error
            yield copy
            return
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _pin_inputs(config: NightConfig) -> tuple[str, list[dict[str, object]]]:
    sources = config.sources
    features = [each for each in (sources.user_features, sources.item_features) if each]
    return pin(source_files([*sources.interactions, *features], config.path(".")))


def _begin(
    config: NightConfig, bundle: Bundle, cut: datetime, *, until: str | None, progress: Progress
) -> Step:
    sources_digest, inputs = _pin_inputs(config)
    store = config.store()
    for _ in range(ERASURE_LOOKS):
        erased = Erased.of(all_erasures(store))
        inputs_digest = erased.digest(sources_digest)
        generation = generation_id(cut, config, bundle.digest, inputs_digest)
        build = Build(config, store, generation)
        with open_releases(config) as releases:
            state = releases.state(generation)
            found: Step = {
                "generation": generation,
                "url": f"{build.store.url}/{generation_path(generation)}",
            }
            found["shards"] = list(range(config.shards))
            if state is State.LIVE:
                return {**found, "already_live": True}
            demand("begin", generation, state)
            if state is None:
                releases.note(generation, State.BEGUN)
        # Noted first, looked at again after: an erasure sees this generation, or is seen by it.
        if Erased.of(all_erasures(store)) == erased:
            break
    else:
        raise Conflict("erasures were written each time they were looked at; run `begin` again")
    if build.read_report("begin") is None:
        _prepare(build, bundle, cut=until, erased=erased, sources_digest=sources_digest, facts={
            "inputs_digest": inputs_digest, "inputs": inputs, "bundle_digest": bundle.digest,
            "erased": list(erased.numbers),
        }, progress=progress)  # fmt: skip
    return {**found, "already_live": False}


def _prepare(
    build: Build,
    bundle: Bundle,
    *,
    cut: str | None,
    erased: Erased,
    sources_digest: str,
    facts: Step,
    progress: Progress,
) -> None:
    config, started, holdout = build.config, time.perf_counter(), Holdout()
    columns = sorted({
        str(each.column)
        for model in bundle.models if model.entity == "user"
        for each in model.spec.features
    })  # fmt: skip
    with ThreadPoolExecutor(1, "bundle") as beside:
        pinning = beside.submit(_pin_bundle, build, bundle)

        def told(rows: int) -> None:
            if pinning.done():
                pinning.result()  # what is wrong with a model is told now, not after hours of reading
            progress("read interactions", rows, 0)

        laid = catalogue.write_catalogue(config, bundle, build.root, erased=erased.items)
        items = catalogue.open_items(build.root, laid)
        seen = partition(
            config,
            items,
            build.root / "work/partition",
            before=parse_time(cut) if cut else None,
            feature_columns=columns,
            progress=told,
            late=holdout.add,
            erased=erased,
        )
        item_columns = catalogue.write_item_features(config, bundle, items, build.root)
        pinned = pinning.result()
    if _pin_inputs(config)[0] != sources_digest:
        raise SourceError(
            f"the source files changed while {build.generation} read them; run the night again"
        )
    if not seen.users:
        raise ConfigError("the sources name no entity at all; is sources.interactions right?")
    defaults = {}
    for name, table in configured_tables(config, bundle).items():
        if layout_of(bundle, table).kind == "topk":
            ids, scores = catalogue.popular(items, seen.popularity, table.k)
            defaults[name] = {"items": ids, "scores": scores}
    write_atomically(
        build.path("defaults.json"), orjson.dumps(defaults, option=orjson.OPT_SORT_KEYS)
    )
    files = [
        catalogue.IDS, catalogue.OFFSETS, catalogue.MODEL_INDEX, "defaults.json",
        *(f"models/{model.name}.fp32.onnx" for model in bundle.models),
        *(catalogue.directory_file("item", shard) for shard in range(config.shards)),
        *(f"work/partition/{shard:04d}.{kind}" for shard in range(config.shards) for kind in KINDS),
        *([item_columns] if item_columns else []),
        holdout.write(build.root),
        *(f"bundle/{name}" for name in pinned),
    ]  # fmt: skip
    build.finish(*files)
    build.report("begin", {
        **facts, **laid,
        "bundle_files": pinned,
        "user_seed": seen.seed, "users": seen.users, "interactions": seen.interactions,
        "unknown_items": seen.unknown_items, "seconds": time.perf_counter() - started,
    })  # fmt: skip


def _pin_bundle(build: Build, bundle: Bundle) -> list[str]:
    """The copied bundle, once tried, becomes part of the generation, its models also by their own names.

    Returns its files, sorted; raises BundleError for a model that is not what the bundle says.
    """
    bundle.try_models()
    for model in bundle.models:
        take_file(model.path, build.path(f"models/{model.name}.fp32.onnx"))
    names = sorted(
        path.relative_to(bundle.path).as_posix()
        for path in bundle.path.rglob("*")
        if path.is_file()
    )
    for name in names:
        take_file(bundle.path / name, build.path(f"bundle/{name}"))
    return names
