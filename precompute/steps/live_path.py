"""Live path of a generation: indexes and int8 models, both measured on real inputs."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from cache.errors import (
    SourceError,
)
from cache.format.item_table import ItemTable
from cache.model.input_sample import FILE as PROBE
from cache.model.input_sample import USERS_MAX, probe_part, write_probe
from precompute.builds.build import (
    Build,
    fetch_items,
    fetch_model,
    fetch_partition,
    model_entry,
    open_bundle,
)
from precompute.builds.copies import on_this_host
from precompute.bulk.headroom import writes_files
from precompute.bundles.bundle import BundleModel
from precompute.bundles.index import build_index as write_index
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.partitions.shard_input import ShardInput, read_shard, scratch_folder, slice_shard
from precompute.scoring.inputs import usable_inputs
from precompute.scoring.shard import (
    configured_tables,
    metric_of,
    read_item_features,
)
from precompute.scoring.users import PARTITION
from precompute.steps.live_models import quantize_models, sample_user_vectors

FIRST_SLICES = 4
"""Slices written before more of a shard is: they nearly always hold the samples that are wanted."""


@writes_files
@on_this_host
def build_index(
    config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet
) -> Step:
    """Write one FAISS index per metric that a top-K table uses, over the item vectors in ordinal order."""
    made = Build.of(config, build)
    if (done := made.read_report("index")) is not None:
        return done
    begun, bundle, started = made.need("begin"), open_bundle(made), time.perf_counter()
    fetch_items(made)
    made.fetch(catalogue.VECTORS)
    items = catalogue.open_items(made.root, begun, dims=bundle.dims)
    metrics = sorted({
        metric_of(bundle, table)
        for table in configured_tables(config, bundle).values()
        if table.kind in ("user_topk", "item_similar")
    })  # fmt: skip
    # Recall is measured with real users where the index serves users.
    tower = bundle.user_tower
    fetch_model(made, tower)
    queries = sample_user_vectors(bundle, made.root / "models", items, _sample(made, items, tower))
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


@writes_files
@on_this_host
def quantize(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
    """int8 versions of the live models, calibrated and compared with fp32 on a sample of real inputs."""
    made = Build.of(config, build)
    if (done := made.read_report("quantize")) is not None:
        return done
    begun, bundle, started = made.need("begin"), open_bundle(made), time.perf_counter()
    fetch_items(made)
    made.fetch(catalogue.VECTORS)
    for model in bundle.models:
        fetch_model(made, model)
    items = catalogue.open_items(made.root, begun, dims=bundle.dims)
    users, parts = _probed(made, items, bundle.user_tower)
    made.finish(write_probe(made.root, parts))
    models = quantize_models(
        bundle,
        made.root / "models",
        items,
        lambda model: users if model is bundle.user_tower else _sample(made, items, model),
        item_features={
            model.name: read_item_features(made, model.spec, items.count)
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
        "probe": asdict(made.describe(PROBE)),
        "seconds": time.perf_counter() - started,
    }
    made.report("quantize", report)
    return report


def _slices(made: Build) -> Iterator[ShardInput]:
    """All users in hash order (so: at random), a slice at a time; for the first few a shard is not rewritten."""
    config, folder = made.config, made.root / PARTITION
    for shard in range(config.shards):
        fetch_partition(made, shard)
        done = 0
        for first in (FIRST_SLICES, None):
            with scratch_folder(folder) as scratch:
                slices = slice_shard(folder, shard, config.shards, scratch, first=first)
                for number in slices.numbers[done:]:
                    yield read_shard(slices.folder, number, history_limit=config.history_limit)
            done = len(slices.numbers)
            if done < FIRST_SLICES:
                break


def _sample(made: Build, items: ItemTable, model: BundleModel) -> ShardInput:
    """Real inputs of the first slice that holds any which the model can use."""
    for found in _slices(made):
        if len(usable_inputs(items, found, {model.name: model.spec})[0]):
            return found
    raise SourceError(f"no entity of the sources has the inputs that {model.name} wants")


def _probed(made: Build, items: ItemTable, model: BundleModel) -> tuple[ShardInput, list[Any]]:
    """Inputs as `_sample` finds them, and the parts of the probe: slice after slice, until it is full."""
    sample, parts, count = None, [], 0
    for found in _slices(made):
        rows = usable_inputs(items, found, {model.name: model.spec})[0][: USERS_MAX - count]
        if len(rows):
            sample, count = sample or found, count + len(rows)
            parts.append(
                probe_part(found.hashes, found.indptr, found.ordinals, found.features, rows)
            )
        if count >= USERS_MAX:
            break
    if sample is None:
        raise SourceError(f"no entity of the sources has the inputs that {model.name} wants")
    return sample, parts
