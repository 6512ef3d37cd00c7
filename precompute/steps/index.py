"""Indexes: FAISS over the item vectors, one for each metric, with the recall measured on real users."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from precompute.builds.build import Build, fetch_items, fetch_model, open_bundle
from precompute.builds.copies import on_this_host
from precompute.builds.night import Night, StepRow
from precompute.builds.tables import configured_tables, metric_of
from precompute.bulk.headroom import writes_files
from precompute.bundles.bundle import Bundle
from precompute.bundles.index import build_index
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.scoring.input_samples import given_vectors, lacks_histories, sample_inputs
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
    queries = _queries(made, bundle, items)
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


def _queries(made: Build, bundle: Bundle, items: ItemTable) -> NDArray[np.float32]:
    """float32 [n, dims]: vectors of real users, for recall is measured with those where the index serves users."""
    tower = bundle.user_tower
    if lacks_histories(made, tower):
        return given_vectors(made)
    fetch_model(made, tower)
    sample = sample_inputs(made, items, tower)
    return sample_user_vectors(bundle, made.root / "models", items, sample)


def in_night(night: Night) -> StepRow:
    """The step with its row in a night's table."""
    found = run(night.config, night.build, progress=night.progress)
    indexes = found["indexes"].values()
    what = ", ".join(
        f"{each['metric']}: {each['kind']}, recall {each['recall']:.4f}" for each in indexes
    )
    return StepRow(found, what, size_bytes=sum(each["file"]["size_bytes"] for each in indexes))
