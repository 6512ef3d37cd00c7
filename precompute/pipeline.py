"""The steps of a night: plain functions of small JSON-able values, each safe to repeat under its generation.

begin -> embed_items -> score_shard x N -> assemble -> build_index, quantize -> load -> verify -> publish -> warm
-> retire. Only `publish` changes what users see.
"""

import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import numpy as np
import orjson

from cache.artefacts import fetch_checked, generation_path, write_atomically
from cache.directory import Directory
from cache.errors import (
    BundleError,
    ConfigError,
    Conflict,
    CorruptArtefact,
    Refused,
    SourceError,
)
from cache.items import ItemTable
from cache.manifest import (
    Artefact,
    DirectoryPart,
    EntitySet,
    Index,
    ItemFiles,
    Manifest,
    Model,
    Table,
    TablePart,
)
from precompute import catalogue
from precompute.build import (
    Build,
    Progress,
    cut_of,
    generation_id,
    model_entry,
    open_bundle,
    quiet,
    read_sealed,
)
from precompute.bundle import Bundle, BundleModel
from precompute.config import NightConfig, parse_time
from precompute.control import Control, connect
from precompute.gates import Candidate, run_gates, skew_shards
from precompute.index import build_index as write_index
from precompute.inputs import usable_inputs
from precompute.live_models import quantize_models, sample_user_vectors
from precompute.load import load_part, parts_of, total_bytes
from precompute.partition import ShardInput, first_hash, partition, read_shard
from precompute.release import Releases, drop_old_rows, sweepable
from precompute.release import restore as restore_redis
from precompute.release import retire as retire_generation
from precompute.scoring import (
    configured_tables,
    embed_catalogue,
    entity_of,
    layout_of,
    metric_of,
    producer_of,
    read_item_features,
    score_items,
    score_users,
)
from precompute.sources import pin, source_files
from precompute.states import State, demand
from precompute.tables import records_per_page

Step = dict[str, Any]
HEADROOM = 0.95
WARM_POLL_S = 0.1
BUNDLE_COPIES = 3


@contextmanager
def _releases(config: NightConfig) -> Iterator[Releases]:
    with connect(config.redis_url, config.redis_timeout_s) as client:
        yield Releases(config.store(), Control(client, config.keyspace()))


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
    with _copied_bundle(config) as bundle:
        return _begin(config, bundle, cut, until=moment if data_until else None, progress=progress)


@contextmanager
def _copied_bundle(config: NightConfig) -> Iterator[Bundle]:
    """A private copy of the bundle: everything of the night comes from it, whatever is trained meanwhile."""
    source = config.path(config.bundle)
    # Hidden, so that nothing that lists the store sees it.
    beside = config.store().local(f".bundle.{secrets.token_hex(4)}.part")
    try:
        for left in reversed(range(BUNDLE_COPIES)):
            if not source.exists() and not left:
                raise ConfigError(
                    f"there is no bundle at {source}: set `bundle`, or run `train` first"
                )
            try:
                shutil.copytree(source, beside)
                copy = Bundle.open(beside)
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
    inputs_digest, inputs = _pin_inputs(config)
    generation = generation_id(cut, config, bundle.digest, inputs_digest)
    build = Build(config, config.store(), generation)
    with _releases(config) as releases:
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
    if build.read_report("begin") is None:
        _prepare(build, bundle, cut=until, facts={
            "inputs_digest": inputs_digest, "inputs": inputs, "bundle_digest": bundle.digest,
        }, progress=progress)  # fmt: skip
    return {**found, "already_live": False}


def _prepare(
    build: Build, bundle: Bundle, *, cut: str | None, facts: Step, progress: Progress
) -> None:
    config, started = build.config, time.perf_counter()
    pinned = _pin_bundle(build, bundle)
    for model in bundle.models:
        write_atomically(build.path(f"models/{model.name}.fp32.onnx"), model.path.read_bytes())
    laid = catalogue.write_catalogue(config, bundle, build.root)
    items = catalogue.open_items(build.root, laid)
    columns = sorted({
        str(each.column)
        for model in bundle.models if model.entity == "user"
        for each in model.spec.features
    })  # fmt: skip
    seen = partition(
        config,
        items,
        build.root / "work/partition",
        before=parse_time(cut) if cut else None,
        feature_columns=columns,
        progress=lambda rows: progress("read interactions", rows, 0),
    )
    item_columns = catalogue.write_item_features(config, bundle, items, build.root)
    if _pin_inputs(config)[0] != facts["inputs_digest"]:
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
        *(f"work/partition/{shard:04d}.{kind}" for shard in range(config.shards) for kind in ("rows", "features")),
        *([item_columns] if item_columns else []),
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
    """The copied bundle becomes part of the generation; its files, sorted."""
    names = sorted(
        path.relative_to(bundle.path).as_posix()
        for path in bundle.path.rglob("*")
        if path.is_file()
    )
    for name in names:
        write_atomically(build.path(f"bundle/{name}"), (bundle.path / name).read_bytes())
    return names


def embed_items(
    config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet
) -> Step:
    """The item tower over the whole catalogue; every shard compares with these vectors."""
    made = Build.of(config, build)
    if (done := made.read_report("embed_items")) is not None:
        return done
    begun, bundle, started = made.need("begin"), open_bundle(made), time.perf_counter()
    _fetch_items(made)
    items = catalogue.open_items(made.root, begun)
    vectors = embed_catalogue(made, bundle, items)
    if not np.isfinite(vectors).all():
        row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise Refused(
            f"the item tower gave a non-finite vector for item {items.id_of(row)!r}",
            rule="finite",
            value="non-finite",
        )
    write_atomically(made.path(catalogue.VECTORS), vectors.astype("<f4").tobytes())
    made.finish(catalogue.VECTORS)
    progress("embed items", items.count, items.count)
    report = {"items": items.count, "dims": bundle.dims, "seconds": time.perf_counter() - started}
    made.report("embed_items", report)
    return report


def _fetch_items(made: Build) -> None:
    names = [catalogue.IDS, catalogue.OFFSETS, catalogue.MODEL_INDEX]
    names += [catalogue.directory_file("item", shard) for shard in range(made.config.shards)]
    for name in names:
        made.fetch(name)


def score_shard(
    config: NightConfig, build: Mapping[str, Any], shard: int, *, progress: Progress = quiet
) -> Step:
    """Score one hash range of users and items into pages; a finished shard is found, not done again."""
    made = Build.of(config, build)
    name = f"shard-{shard:04d}"
    report = made.read_report(name)
    if report is None:
        _fetch_items(made)
        users = score_users(made, shard, progress)
        items = score_items(made, shard, progress)
        described = [*users["tables"].values(), *items["tables"].values()]
        made.finish(
            users["directory"]["path"],
            *(each[kind]["path"] for each in described for kind in ("file", "sums")),
        )
        report = {"shard": shard, "users": users, "items": items}
        made.report(name, report)
    return {
        "shard": shard,
        "users": report["users"]["scored"],
        "items": report["items"]["scored"],
        "seconds": round(report["users"]["seconds"]["all"] + report["items"]["seconds"]["all"], 3),
    }


def assemble(
    config: NightConfig, build: Mapping[str, Any], scored: Sequence[Mapping[str, Any]]
) -> Step:
    """Check that every shard is there and number the pages; nothing is sorted or moved."""
    made = Build.of(config, build)
    missing = sorted(set(range(config.shards)) - {int(each["shard"]) for each in scored})
    if missing:
        raise Conflict(f"shards {missing} of {config.shards} were not scored")
    reports = [made.need(f"shard-{shard:04d}") for shard in range(config.shards)]
    users = sum(report["users"]["scored"] for report in reports)
    made.report("assemble", {"users_scored": users})
    return {"generation": made.generation, "users": users}


def build_index(
    config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet
) -> Step:
    """One FAISS index per metric that a top-K table uses, over the item vectors in ordinal order."""
    made = Build.of(config, build)
    if (done := made.read_report("index")) is not None:
        return done
    begun, bundle, started = made.need("begin"), open_bundle(made), time.perf_counter()
    _fetch_items(made)
    made.fetch(catalogue.VECTORS)
    items = catalogue.open_items(made.root, begun, dims=bundle.dims)
    metrics = sorted({
        metric_of(bundle, table)
        for table in configured_tables(config, bundle).values()
        if table.kind in ("user_topk", "item_similar")
    })  # fmt: skip
    # Recall is measured with real users where the index serves users.
    tower = bundle.user_tower
    made.fetch(f"models/{tower.name}.fp32.onnx")
    queries = sample_user_vectors(
        bundle, made.root / "models", items, _sample(made, begun, items, tower)
    )
    indexes = {}
    for number, metric in enumerate(metrics):
        name = f"index/{metric}.faiss"
        found = write_index(
            items.vectors, metric, made.path(name), kind=config.index,
            queries=queries if metric == bundle.metric else None,
        )  # fmt: skip
        made.finish(name)
        indexes[metric] = {
            "metric": metric,
            "kind": found.kind,
            "file": asdict(made.describe(name)),
            "recall": found.recall,
        }
        progress("build index", number + 1, len(metrics))
    report = {"indexes": indexes, "seconds": time.perf_counter() - started}
    made.report("index", report)
    return report


def quantize(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
    """int8 versions of the live models, calibrated and compared with fp32 on a sample of real inputs."""
    made = Build.of(config, build)
    if (done := made.read_report("quantize")) is not None:
        return done
    begun, bundle, started = made.need("begin"), open_bundle(made), time.perf_counter()
    _fetch_items(made)
    for name in (catalogue.VECTORS, *(f"models/{model.name}.fp32.onnx" for model in bundle.models)):
        made.fetch(name)
    items = catalogue.open_items(made.root, begun, dims=bundle.dims)
    models = quantize_models(
        bundle,
        made.root / "models",
        items,
        lambda model: _sample(made, begun, items, model),
        item_features={
            model.name: read_item_features(made, model.spec)
            for model in bundle.models
            if model.entity == "item"
        },
    )
    for name, found in models.items():
        if found.int8:
            made.finish(f"models/{name}.int8.onnx")
    progress("quantize", len(models), len(models))
    report = {
        "models": {
            name: asdict(model_entry(made, bundle, name, found.int8, found.agreement))
            for name, found in models.items()
        },
        "seconds": time.perf_counter() - started,
    }
    made.report("quantize", report)
    return report


def _sample(made: Build, begun: Step, items: ItemTable, model: BundleModel) -> ShardInput:
    """Real inputs of the first hash shard (so: entities at random) that holds any which the model can use."""
    for shard in range(made.config.shards):
        _fetch_partition(made, shard)
        found = read_shard(
            made.root / "work/partition",
            shard,
            begun["user_seed"],
            history_limit=made.config.history_limit,
        )
        if len(usable_inputs(items, found, {model.name: model.spec})[0]):
            return found
    raise SourceError(f"no entity of the sources has the inputs that {model.name} wants")


def _fetch_partition(made: Build, shard: int) -> None:
    for kind in ("rows", "features"):
        made.fetch(f"work/partition/{shard:04d}.{kind}")


def seal(made: Build) -> Manifest:
    """Write the manifest from the steps' reports; once written it stays."""
    if (sealed := read_sealed(made)) is not None:
        return sealed
    config, bundle, begun = made.config, open_bundle(made), made.need("begin")
    made.need("assemble")
    reports = [made.need(f"shard-{shard:04d}") for shard in range(config.shards)]
    index, models, embedded = made.need("index"), made.need("quantize"), made.need("embed_items")
    _fetch_items(made)
    made.fetch(catalogue.VECTORS)
    made.fetch("defaults.json")
    manifest = Manifest(
        namespace=config.namespace,
        generation=made.generation,
        data_until=cut_of(made.generation),
        created_at=int(time.time()),
        bundle_digest=begun["bundle_digest"],
        inputs_digest=begun["inputs_digest"],
        entity_sets={
            "user": _entity_set("user", begun["user_seed"], [report["users"]["directory"] for report in reports]),
            "item": _entity_set("item", begun["item_seed"], [
                asdict(made.describe(catalogue.directory_file("item", shard))) for shard in range(config.shards)
            ]),
        },
        items=ItemFiles(
            ids=made.describe(catalogue.IDS),
            offsets=made.describe(catalogue.OFFSETS),
            vectors=made.describe(catalogue.VECTORS),
            model_index=made.describe(catalogue.MODEL_INDEX),
            count=begun["items"],
            dims=bundle.dims,
        ),
        tables=_tables(config, bundle, reports),
        models={
            name: Model(**{
                **each, "fp32": Artefact(**each["fp32"]), "int8": Artefact(**each["int8"]) if each["int8"] else None,
            })
            for name, each in models["models"].items()
        },
        indexes={
            name: Index(**{**each, "file": Artefact(**each["file"])}) for name, each in index["indexes"].items()
        },
        defaults=made.describe("defaults.json"),
        timings={
            "begin": begun["seconds"], "embed_items": embedded["seconds"], "index": index["seconds"],
            "quantize": models["seconds"],
            "score": sum(report["users"]["seconds"]["all"] + report["items"]["seconds"]["all"] for report in reports),
        },
        facts={
            "users_in_source": begun["users"],
            "users_scored": sum(report["users"]["scored"] for report in reports),
            "users_without_input": sum(report["users"]["without_input"] for report in reports),
            "short_lists": sum(report["users"]["short"] for report in reports),
            "interactions": begun["interactions"],
            "interactions_with_unknown_items": begun["unknown_items"],
            "items_without_vector": begun["items_without_vector"],
            "inputs": begun["inputs"],
        },
    )  # fmt: skip
    made.store.write(generation_path(made.generation, "manifest.json"), manifest.to_bytes())
    return manifest


def _entity_set(name: Any, seed: int, parts: Sequence[Step]) -> EntitySet:
    found = tuple(
        DirectoryPart(first_hash(shard, len(parts)), part["size_bytes"] // 8, Artefact(**part))
        for shard, part in enumerate(parts)
    )
    return EntitySet(name, seed, sum(part.count for part in found), found)


def _tables(config: NightConfig, bundle: Bundle, reports: Sequence[Step]) -> dict[str, Table]:
    tables = {}
    for name, table in configured_tables(config, bundle).items():
        entity, layout = entity_of(bundle, name, table), layout_of(bundle, table)
        per_page = records_per_page(layout, config.page_bytes)
        parts, page = [], 0
        for report in reports:
            part = report["users" if entity == "user" else "items"]["tables"][name]
            pages = -(-part["count"] // per_page)
            parts.append(
                TablePart(
                    page, pages, part["count"], Artefact(**part["file"]), Artefact(**part["sums"])
                )
            )
            page += pages
        labels = bundle.values[str(table.value)].labels if table.kind == "value" else ()
        tables[name] = Table(
            name, entity, producer_of(bundle, table), layout, per_page, tuple(parts), tuple(labels)  # type: ignore[arg-type]
        )  # fmt: skip
    return tables


def load(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
    """Stream all pages into Redis; parts that are there stay. Refused before Redis would run full."""
    made, started = Build.of(config, build), time.perf_counter()
    manifest = seal(made)
    for artefact in manifest.pages():
        made.fetch(artefact.path)
    size_bytes, loaded = total_bytes(manifest), 0
    with _releases(config) as releases:
        control, keys = releases.control, config.keyspace()
        state = releases.state(made.generation)
        if state not in (State.LIVE, State.SUPERSEDED):
            demand("load", made.generation, state)
            control.check_policy()
            _check_headroom(made, control, size_bytes)
            if state is None:
                releases.note(made.generation, State.BEGUN)
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress("load pages", done, size_bytes)

        for part in parts_of(manifest):
            if not load_part(
                control.client, keys, manifest, made.root, part,
                chunk_bytes=config.load_chunk_bytes, progress=advance,
            ):  # fmt: skip
                advance(part.pages.file.size_bytes)
            else:
                loaded += part.pages.file.size_bytes
        if state in (None, State.BEGUN):
            releases.note(made.generation, State.LOADED)
    seconds = time.perf_counter() - started
    return {
        "generation": made.generation,
        "bytes": size_bytes,
        "loaded_bytes": loaded,
        "seconds": round(seconds, 3),
    }


def _check_headroom(made: Build, control: Control, size_bytes: int) -> None:
    info: Any = control.client.info("memory")
    limit, used = int(info.get("maxmemory", 0)), int(info["used_memory"])
    marked: Any = control.client.hlen(control.keys.loaded(made.generation))
    if not limit or marked:
        return
    keyspace: Any = control.client.info("keyspace")
    expiring = any(each["expires"] for each in keyspace.values())
    if expiring and control.check_policy().startswith("volatile-"):
        # Overlays make way for pages: what stays is Redis' own overhead and the pages of every generation.
        overhead = int(info.get("used_memory_overhead", used))
        used = min(used, overhead + _pages_bytes(made, control))
    if used + size_bytes > HEADROOM * limit:
        raise Refused(
            f"loading {made.generation} needs {size_bytes:,} bytes beside {used:,} in use, more than "
            f"{HEADROOM:.0%} of Redis' maxmemory {limit:,}; raise it or retire generations",
            rule="redis_headroom",
            value=used + size_bytes,
            threshold=int(HEADROOM * limit),
        )


def _pages_bytes(made: Build, control: Control) -> int:
    """Payload of all other generations of which Redis may hold pages."""
    total = 0
    for generation, row in control.rows().items():
        if generation != made.generation and row.state is not State.RETIRED:
            raw = made.store.read(generation_path(generation, "manifest.json"))
            total += 0 if raw is None else total_bytes(Manifest.from_bytes(raw))
    return total


def verify(
    config: NightConfig,
    build: Mapping[str, Any],
    *,
    attempt: str = "shell",
    progress: Progress = quiet,
) -> Step:
    """Run every gate; a failed one refuses the generation for good reason, written down."""
    made, started = Build.of(config, build), time.perf_counter()
    manifest = seal(made)
    with _releases(config) as releases:
        ledger = releases.ledger()
        state = releases.state(made.generation, ledger)
        if state in (State.LIVE, State.SUPERSEDED):
            return {"generation": made.generation, "gates": len(manifest.gates), "verified": True}
        demand("verify", made.generation, state)
        files = _files(made, manifest)
        for shard in skew_shards(manifest.entity_sets["user"]):
            _fetch_partition(made, shard)
        live = None
        if ledger.live is not None:
            raw = made.store.read(generation_path(ledger.live, "manifest.json"))
            live = Manifest.from_bytes(raw) if raw is not None else None
        candidate = Candidate(
            manifest, made.root, ItemTable.open(made.root, manifest), releases.control, live,
            config.gates, config.history_limit,
        )  # fmt: skip
        verdicts = [files, *(each.to_json() for each in run_gates(candidate))]
        progress("verify", len(verdicts), len(verdicts))
        # It may have gone live, or have been retired, while the gates ran: its manifest is then as released.
        demand("verify", made.generation, releases.state(made.generation))
        manifest = replace(
            manifest,
            gates=tuple(verdicts),
            timings={**manifest.timings, "verify": time.perf_counter() - started},
        )
        made.store.write(generation_path(made.generation, "manifest.json"), manifest.to_bytes())
        failed = [gate for gate in manifest.gates if not gate["passed"]]
        if failed:
            reasons = "; ".join(
                f"{gate['rule']} is {gate['value']}, the threshold {gate['threshold']} {gate['note']}".strip()
                for gate in failed
            )
            releases.refuse(made.generation, reason=reasons, attempt=attempt)
            raise Refused(
                f"{made.generation} is refused, the live generation stays: {reasons}",
                rule=failed[0]["rule"], value=failed[0]["value"], threshold=failed[0]["threshold"],
            )  # fmt: skip
        releases.mark_verified(made.generation, attempt=attempt)
    return {"generation": made.generation, "gates": len(manifest.gates), "verified": True}


def _files(made: Build, manifest: Manifest) -> Step:
    """Every file of the generation against its checksum, as a gate."""
    files = [*manifest.artefacts(), *manifest.pages()]
    try:
        for artefact in files:
            fetch_checked(made.store, made.generation, artefact)
    except CorruptArtefact as error:
        return {
            "rule": "files",
            "passed": False,
            "value": error.message,
            "threshold": "checksums",
            "note": "",
        }
    return {
        "rule": "files",
        "passed": True,
        "value": len(files),
        "threshold": len(files),
        "note": "",
    }


def publish(config: NightConfig, verified: Mapping[str, Any], *, attempt: str) -> Step:
    """Read a record of every table back, move the pointer, read it back: success is what a reader can read."""
    made = Build.of(config, verified)
    manifest = seal(made)
    with _releases(config) as releases:
        moved = releases.prepare(made.generation, attempt=attempt)
        if moved is None:
            for entities in manifest.entity_sets.values():
                for part in entities.parts:
                    fetch_checked(made.store, made.generation, part.file)
            # Before the pointer moves: afterwards it would be too late to find that nothing can be read.
            for table in manifest.tables.values():
                _read_back(made, manifest, table, releases.control)
            moved = releases.publish(made.generation, attempt=attempt)
        now = releases.control.pointer()
        if now is None or now.epoch < moved.pointer.epoch:
            raise CorruptArtefact("the pointer that was written cannot be read back")
    return {
        "generation": moved.pointer.generation,
        "epoch": moved.pointer.epoch,
        "previous": moved.pointer.previous,
        "changed": moved.changed,
    }


def _read_back(made: Build, manifest: Manifest, table: Table, control: Control) -> None:
    directory = Directory.open(made.root, manifest.entity_sets[table.entity])
    if not directory.count:
        return
    page, offset = table.locate(*directory.place(directory.count - 1))
    name = control.keys.page(manifest.generation, table.name, page)
    raw: Any = control.client.getrange(name, offset, offset + table.layout.size_bytes - 1)
    if len(raw) != table.layout.size_bytes:
        raise CorruptArtefact(
            f"the last record of {table.name} cannot be read back from Redis", page=name
        )


def warm(config: NightConfig, build: Mapping[str, Any]) -> Step:
    """Wait, up to `warm_timeout_s`, until every serving replica answers from the generation."""
    generation, started = str(build["generation"]), time.perf_counter()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        control = Control(client, config.keyspace())
        while True:
            replicas = control.replicas()
            waiting = [replica.name for replica in replicas if replica.serving != generation]
            seconds = time.perf_counter() - started
            if not waiting or seconds > config.warm_timeout_s:
                return {
                    "generation": generation,
                    "replicas": len(replicas),
                    "waiting": waiting,
                    "seconds": round(seconds, 3),
                }
            time.sleep(WARM_POLL_S)


def retire(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Remove generations that nobody needs any more: pages, files, and rows whose overlays are gone."""
    with _releases(config) as releases:
        found = sweepable(
            releases,
            keep=config.keep,
            grace_s=config.superseded_grace_s,
            abandon_after_s=config.abandon_after_s,
        )
        removed = 0
        for number, generation in enumerate(found):
            removed += retire_generation(
                releases,
                config.keyspace(),
                generation,
                attempt=attempt,
                abandon_after_s=config.abandon_after_s,
            )
            progress("retire", number + 1, len(found))
        releases.control.forget_dead_replicas(releases.clock())
        rows = drop_old_rows(releases, overlay_ttl_s=config.overlay_ttl_s)
    return {"retired": found, "keys": removed, "rows": rows}


def roll_back(config: NightConfig, *, to: str | None, reason: str, attempt: str) -> Step:
    """Make an earlier generation live again (the previous one unless named)."""
    with _releases(config) as releases:
        moved = releases.roll_back(to=to, reason=reason, attempt=attempt)
    pointer = moved.pointer
    return {
        "generation": pointer.generation, "epoch": pointer.epoch, "previous": pointer.previous,
        "changed": moved.changed,
    }  # fmt: skip


def restore(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Rebuild a lost Redis from the artefact store: registry, pages, pointer under a new epoch."""
    started, done = time.perf_counter(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress("restore pages", done, 0)

    with _releases(config) as releases:
        pointer, loaded, size_bytes = restore_redis(
            releases,
            config.keyspace(),
            attempt=attempt,
            chunk_bytes=config.load_chunk_bytes,
            progress=advance,
        )
    return {
        "generation": pointer.generation, "epoch": pointer.epoch, "loaded": loaded, "bytes": size_bytes,
        "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip
