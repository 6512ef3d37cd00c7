"""Quantization: int8 forms of the live models, compared with fp32 on real inputs, which features sample."""

import time
from collections.abc import Mapping
from typing import Any

from precompute.builds.build import (
    Build,
    fetch_catalogue,
    fetch_model,
    model_entry,
    open_bundle,
    with_host_copies,
)
from precompute.builds.reports import (
    BEGIN_REPORT,
    QUANTIZE_REPORT,
    BuildId,
    QuantizeReport,
    SampleFields,
)
from precompute.bulk.headroom import writes_files
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import sample_takers
from precompute.partitions import catalogue
from precompute.scoring.input_samples import (
    lacks_histories,
    quantize_models,
    sample_inputs,
)
from precompute.scoring.items import open_item_features
from precompute.steps.night import Night, StepRow


@writes_files
@with_host_copies
def run(config: NightConfig, build: BuildId, *, progress: Progress = quiet) -> QuantizeReport:
    """int8 versions of the live models, calibrated and compared with fp32 on a sample of real inputs."""
    generation_build = Build.of(config, build)
    if (finished_report := generation_build.read_report(QUANTIZE_REPORT)) is not None:
        return finished_report
    begin_report, bundle, started = (
        generation_build.need_report(BEGIN_REPORT),
        open_bundle(generation_build),
        time.perf_counter(),
    )
    fetch_catalogue(generation_build)
    generation_build.fetch(catalogue.ITEM_VECTORS_FILE)
    for model in bundle.models:
        fetch_model(generation_build, model)
    items = catalogue.open_items(generation_build.root, begin_report, dims=bundle.dims)
    takers = sample_takers()
    users = sample_inputs(
        generation_build, items, bundle.user_tower, metric=bundle.metric, sample_takers=takers
    )
    samples: SampleFields = {}
    for taker in takers:
        samples |= taker.finish(generation_build)
    models = quantize_models(
        bundle,
        generation_build.root / "models",
        items,
        lambda model: (
            users
            if model is bundle.user_tower
            else sample_inputs(generation_build, items, model, metric=bundle.metric)
        ),
        item_features={
            model.name: open_item_features(generation_build, model.spec, items.count)
            for model in bundle.models
            if model.entity == "item"
        },
    )
    for name, live_model in models.items():
        if live_model.int8:
            generation_build.finish(f"models/{name}.int8.onnx")
    progress("quantize", len(models), len(models))
    how: dict[str, dict[str, Any]] = {
        model.name: {"histories": "drawn"} if lacks_histories(generation_build, model) else {}
        for model in bundle.models
    }
    report: QuantizeReport = {
        "models": {
            name: model_entry(
                generation_build,
                bundle,
                name,
                live_model.int8,
                {**live_model.agreement, **how[name]},
            )
            for name, live_model in models.items()
        },
        **samples,
        "seconds": time.perf_counter() - started,
    }
    generation_build.report(QUANTIZE_REPORT, report)
    return report


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    report = run(night.config, night.build, progress=night.progress)
    models = report["models"]
    summary = ", ".join(
        f"{name}: {_agreement(model_report['agreement'])}" for name, model_report in models.items()
    )
    files = [
        file
        for model_report in models.values()
        for file in (model_report["fp32"], model_report["int8"])
        if file
    ]
    return StepRow(report, summary, size_bytes=sum(file["size_bytes"] for file in files))


def _agreement(agreement: Mapping[str, Any]) -> str:
    if why := agreement.get("why"):
        return f"fp32 ({why})"  # models of trees
    overlap = f" overlap {agreement['overlap_at_20']:.4f}" if "overlap_at_20" in agreement else ""
    return f"{agreement.get('precision')}{overlap}"
