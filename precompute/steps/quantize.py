"""Quantization: int8 forms of the live models, compared with fp32 on real inputs, which are kept as the probe."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cache.model.input_sample import FILE as PROBE
from cache.model.input_sample import write_probe
from precompute.builds.build import Build, fetch_items, fetch_model, model_entry, open_bundle
from precompute.builds.copies import on_this_host
from precompute.builds.night import Night, StepRow
from precompute.bulk.headroom import writes_files
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.scoring.input_samples import lacks_histories, probe_inputs, sample_inputs
from precompute.scoring.live_models import quantize_models
from precompute.scoring.shard import open_item_features


@writes_files
@on_this_host
def run(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
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
    users, parts = probe_inputs(made, items, bundle.user_tower, metric=bundle.metric)
    if parts:
        made.finish(write_probe(made.root, parts))
    models = quantize_models(
        bundle,
        made.root / "models",
        items,
        lambda model: (
            users
            if model is bundle.user_tower
            else sample_inputs(made, items, model, metric=bundle.metric)
        ),
        item_features={
            model.name: open_item_features(made, model.spec, items.count)
            for model in bundle.models
            if model.entity == "item"
        },
    )
    for name, found in models.items():
        if found.int8:
            made.finish(f"models/{name}.int8.onnx")
    progress("quantize", len(models), len(models))
    how: dict[str, dict[str, Any]] = {
        model.name: {"histories": "drawn"} if lacks_histories(made, model) else {}
        for model in bundle.models
    }
    report = {
        "models": {
            name: asdict(
                model_entry(made, bundle, name, found.int8, {**found.agreement, **how[name]})
            )
            for name, found in models.items()
        },
        "probe": asdict(made.describe(PROBE)) if parts else None,
        "seconds": time.perf_counter() - started,
    }
    made.report("quantize", report)
    return report


def in_night(night: Night) -> StepRow:
    """The step with its row in a night's table."""
    found = run(night.config, night.build, progress=night.progress)
    models = found["models"]
    what = ", ".join(f"{name}: {_agreement(each['agreement'])}" for name, each in models.items())
    files = [file for each in models.values() for file in (each["fp32"], each["int8"]) if file]
    return StepRow(found, what, size_bytes=sum(file["size_bytes"] for file in files))


def _agreement(found: Mapping[str, Any]) -> str:
    overlap = f" overlap {found['overlap_at_20']:.4f}" if "overlap_at_20" in found else ""
    return f"{found.get('precision')}{overlap}"
