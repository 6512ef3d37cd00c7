"""Step `quantize`: writes int8 versions of the live models, compared with fp32 on real inputs."""

import time
from collections.abc import Mapping
from typing import Any

from precompute.builds.build import Build, fetch_catalogue, fetch_model, model_entry, open_bundle, with_host_copies
from precompute.builds.reports import BEGIN_REPORT, QUANTIZE_REPORT, BuildId, QuantizeReport, SampleFields
from precompute.bulk.headroom import convert_disk_errors
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import sample_takers
from precompute.partitions import catalogue
from precompute.scoring.input_samples import lacks_histories, quantize_models, sample_inputs
from precompute.scoring.items import open_item_features
from precompute.steps.night import Night, StepRow


@convert_disk_errors
@with_host_copies
def run(config: NightConfig, build: BuildId, *, progress: Progress = quiet) -> QuantizeReport:
    """Write int8 versions of the live models, calibrated and compared with fp32 on a sample; return the report."""
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
    probe_takers = sample_takers()
    user_inputs = sample_inputs(
        generation_build, items, bundle.user_tower, metric=bundle.metric, sample_takers=probe_takers
    )
    sample_fields: SampleFields = {}
    for taker in probe_takers:
        sample_fields |= taker.finish(generation_build)
    live_model_by_name = quantize_models(
        bundle,
        generation_build.root / "models",
        items,
        lambda model: (
            user_inputs
            if model is bundle.user_tower
            else sample_inputs(generation_build, items, model, metric=bundle.metric)
        ),
        item_features={
            model.name: open_item_features(generation_build, model.spec, items.count)
            for model in bundle.models
            if model.entity == "item"
        },
    )
    for model_name, live_model in live_model_by_name.items():
        if live_model.has_int8:
            generation_build.finish(f"models/{model_name}.int8.onnx")
    progress("quantize", len(live_model_by_name), len(live_model_by_name))
    sample_origin_by_model: dict[str, dict[str, Any]] = {
        model.name: {"histories": "drawn"} if lacks_histories(generation_build, model) else {}
        for model in bundle.models
    }
    report: QuantizeReport = {
        "models": {
            model_name: model_entry(
                generation_build,
                bundle,
                model_name,
                live_model.has_int8,
                {**live_model.int8_agreement, **sample_origin_by_model[model_name]},
            )
            for model_name, live_model in live_model_by_name.items()
        },
        **sample_fields,
        "seconds": time.perf_counter() - started,
    }
    generation_build.report(QUANTIZE_REPORT, report)
    return report


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    report = run(night.config, night.build, progress=night.progress)
    models = report["models"]
    summary = ", ".join(
        f"{model_name}: {_agreement_text(model_report['agreement'])}" for model_name, model_report in models.items()
    )
    model_files = [
        model_file
        for model_report in models.values()
        for model_file in (model_report["fp32"], model_report["int8"])
        if model_file
    ]
    return StepRow(report, summary, size_bytes=sum(model_file["size_bytes"] for model_file in model_files))


def _agreement_text(int8_agreement: Mapping[str, Any]) -> str:
    if fp32_reason := int8_agreement.get("why"):
        return f"fp32 ({fp32_reason})"  # tree models
    overlap = f" overlap {int8_agreement['overlap_at_20']:.4f}" if "overlap_at_20" in int8_agreement else ""
    return f"{int8_agreement.get('precision')}{overlap}"
