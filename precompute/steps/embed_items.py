"""Step `embed_items`: runs the item tower over the catalogue, once for all shards."""

import time

import numpy as np

from cache.errors import Refused
from cache.format.item_table import ItemTable
from precompute.builds.build import Build, attribute_paths, fetch_catalogue, open_bundle, with_host_copies
from precompute.builds.reports import BEGIN_REPORT, EMBED_ITEMS_REPORT, BuildId, EmbedItemsReport, FacetFields
from precompute.builds.tables import metric_of
from precompute.bulk.headroom import convert_disk_errors
from precompute.bundles.bundle import Bundle
from precompute.config.devices import device_for_shard
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import prior_index, score_table_writers
from precompute.partitions import catalogue
from precompute.partitions.digests import item_digests_paths
from precompute.scoring.defaults import DEFAULTS_FILE as DEFAULTS
from precompute.scoring.defaults import compute_mean_scores, find_favourites, write_defaults
from precompute.scoring.input_samples import sample_user_vectors
from precompute.scoring.items import embed_catalogue, open_item_features
from precompute.scoring.pages import GrowingFile
from precompute.scoring.programs import computed_by
from precompute.scoring.towers import open_tower
from precompute.steps.night import Night, StepRow


@convert_disk_errors
@with_host_copies
def run(config: NightConfig, build: BuildId, *, progress: Progress = quiet) -> EmbedItemsReport:
    """Write the vectors of all items, with which every shard compares; return the report.

    In a night without interactions, also write the defaults, computed from the vectors; otherwise `begin` wrote them.
    """
    generation_build = Build.of(config, build)
    if (finished_report := generation_build.read_report(EMBED_ITEMS_REPORT)) is not None:
        return finished_report
    begin_report, bundle, started = (
        generation_build.need_report(BEGIN_REPORT),
        open_bundle(generation_build),
        time.perf_counter(),
    )
    fetch_catalogue(generation_build)
    items, model = catalogue.open_items(generation_build.root, begin_report), bundle.item_tower
    device = device_for_shard(config.device, 0)
    tower = open_tower(generation_build, model, device)
    features = open_item_features(generation_build, model.spec, items.count)
    prior = prior_index().open(generation_build)
    is_reproducible_by_model = prior.reproducible_models(generation_build, bundle, items, device)
    copied_vectors = None
    if is_reproducible_by_model.get(model.name):
        for digests_file in item_digests_paths(bundle):
            generation_build.fetch(digests_file)
        copied_vectors = prior.item_vectors(bundle, items, generation_build.root, device)
    with GrowingFile(generation_build.path(catalogue.ITEM_VECTORS_FILE)) as vectors_file:
        written_count = 0
        for vectors in embed_catalogue(tower, items, features, copied_vectors):
            if not (is_finite_by_row := np.isfinite(vectors).all(axis=1)).all():
                item = items.id_of(written_count + int(is_finite_by_row.argmin()))
                raise Refused(
                    f"the item tower gave a non-finite vector for item {item!r}", rule="finite", value="non-finite"
                )
            vectors_file.write(np.ascontiguousarray(vectors, "<f4").data.cast("B"))
            written_count += len(vectors)
            progress("embed items", written_count, items.count)
    generation_build.finish(catalogue.ITEM_VECTORS_FILE)
    embedded_items = catalogue.open_items(generation_build.root, begin_report, dims=bundle.dims)
    changes = prior.write_item_changes(generation_build, embedded_items)
    facets: FacetFields = {}
    if not config.sources.interactions:
        facets = _write_defaults(generation_build, bundle, embedded_items)
    seconds = time.perf_counter() - started
    report: EmbedItemsReport = {
        "items": items.count, "dims": bundle.dims, "seconds": seconds, **facets,
        "computed_by": computed_by(device), "regrouped": is_reproducible_by_model, "changes": changes,
        "base": prior.generation,
        "copied": 0 if copied_vectors is None else int((copied_vectors.base_ordinals >= 0).sum()),
    }  # fmt: skip
    generation_build.report(EMBED_ITEMS_REPORT, report)
    return report


def _write_defaults(build: Build, bundle: Bundle, items: ItemTable) -> FacetFields:
    """Write the defaults and score tables of sources without interactions: the items with the highest mean scores."""
    user_vectors = sample_user_vectors(build, bundle, items)
    write_defaults(build, bundle, lambda table: find_favourites(items, user_vectors, metric_of(bundle, table), table.k))
    build.finish(DEFAULTS)
    attributes = build.need_report(BEGIN_REPORT).get("attributes", {})
    if not build.config.facets:
        return {}
    for attribute_path in attribute_paths(attributes):
        build.fetch(attribute_path)
    scores = compute_mean_scores(items, user_vectors, bundle.metric)
    report: FacetFields = {}
    for write_tables in score_table_writers():
        report |= write_tables(build, attributes, items, scores)
    return report


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    report = run(night.config, night.build, progress=night.progress)
    item_count, dims = report["items"], report["dims"]
    summary = f"{item_count:,} items x {dims}"
    if copied_count := report.get("copied"):
        summary += f", {copied_count:,} copied"
    if irreproducible_models := sorted(
        model_name for model_name, is_reproducible in report.get("regrouped", {}).items() if not is_reproducible
    ):
        summary += (
            f"\nnot copied, since last digits depend on the other rows of a batch: {', '.join(irreproducible_models)}"
        )
    return StepRow(report, summary, item_count, "items", item_count * dims * 4)
