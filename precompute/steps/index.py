"""Indexes: FAISS over the item vectors, one for each metric, with the recall measured on real users."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from precompute.builds.build import Build, fetch_items, open_bundle
from precompute.builds.copies import on_this_host
from precompute.builds.night import Night, StepRow
from precompute.builds.tables import configured_tables, metric_of
from precompute.bulk.headroom import writes_files
from precompute.bundles.index import build_index
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.scoring.live_models import sample_user_vectors


@writes_files
@on_this_host
def run(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
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
    # Recall is measured with vectors of users, for these are what the index is asked with.
    queries = sample_user_vectors(made, bundle, items)
    indexes = {}
    for number, metric in enumerate(metrics):
        name = f"index/{metric}.faiss"
        found = build_index(
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


def in_night(night: Night) -> StepRow:
    """The step with its row in a night's table."""
    found = run(night.config, night.build, progress=night.progress)
    indexes = found["indexes"].values()
    what = ", ".join(
        f"{each['metric']}: {each['kind']}, recall {each['recall']:.4f}" for each in indexes
    )
    return StepRow(found, what, size_bytes=sum(each["file"]["size_bytes"] for each in indexes))
