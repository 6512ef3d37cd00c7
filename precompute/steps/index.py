"""Step `index`: builds a FAISS index over the item vectors for each metric, and measures its recall."""

import time

from precompute.builds.build import Build, fetch_catalogue, open_bundle, with_host_copies
from precompute.builds.reports import BEGIN_REPORT, INDEX_REPORT, BuildId, IndexEntry, IndexReport, file_entry
from precompute.builds.tables import configured_tables, metric_of
from precompute.bulk.headroom import convert_disk_errors
from precompute.bundles.index import build_index
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.scoring.input_samples import sample_user_vectors
from precompute.steps.night import Night, StepRow


@convert_disk_errors
@with_host_copies
def run(config: NightConfig, build: BuildId, *, progress: Progress = quiet) -> IndexReport:
    """Write one FAISS index per metric that a top-K table uses, over the item vectors in ordinal order."""
    generation_build = Build.of(config, build)
    if (finished_report := generation_build.read_report(INDEX_REPORT)) is not None:
        return finished_report
    begin_report, bundle, started = (
        generation_build.need_report(BEGIN_REPORT),
        open_bundle(generation_build),
        time.perf_counter(),
    )
    fetch_catalogue(generation_build)
    generation_build.fetch(catalogue.ITEM_VECTORS_FILE)
    items = catalogue.open_items(generation_build.root, begin_report, dims=bundle.dims)
    metrics = sorted({
        metric_of(bundle, table)
        for table in configured_tables(config, bundle).values()
        if table.kind in ("user_topk", "item_similar")
    })  # fmt: skip
    # Recall is measured with users' vectors, since the index is searched with those.
    query_vectors = sample_user_vectors(generation_build, bundle, items)
    index_entries: dict[str, IndexEntry] = {}
    for metric_index, metric in enumerate(metrics):
        index_path = f"index/{metric}.faiss"
        index_report = build_index(
            items.vectors, metric, generation_build.path(index_path), kind=config.index,
            query_vectors=query_vectors if metric == bundle.metric else None,
        )  # fmt: skip
        generation_build.finish(index_path)
        index_entries[metric] = {
            "metric": metric,
            "kind": index_report.index_kind,
            "file": file_entry(generation_build.describe(index_path)),
            "recall": index_report.recall,
        }
        progress("build index", metric_index + 1, len(metrics))
    report: IndexReport = {"indexes": index_entries, "seconds": time.perf_counter() - started}
    generation_build.report(INDEX_REPORT, report)
    return report


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    report = run(night.config, night.build, progress=night.progress)
    index_entries = report["indexes"].values()
    summary = ", ".join(
        f"{index_entry['metric']}: {index_entry['kind']}, recall {index_entry['recall']:.4f}"
        for index_entry in index_entries
    )
    return StepRow(report, summary, size_bytes=sum(index_entry["file"]["size_bytes"] for index_entry in index_entries))
