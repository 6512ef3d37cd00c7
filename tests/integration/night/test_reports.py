"""JSON of a night's results and reports: fields and their order, as the store, Airflow and the shell have them."""

from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pytest

from cache.store.artefacts import generation_path
from precompute.builds import reports
from precompute.builds.build import Build
from precompute.builds.reports import ReportName
from precompute.config.settings import NightConfig
from precompute.releases.replication import VerifyReport
from precompute.steps.night import Night, run_night
from tests.integration.nights import DATA_UNTIL, prepare

RESULTS = {
    "begin": "generation url shards already_live",
    "embed_items": "items dims seconds computed_by regrouped changes base copied",
    "score": "users items",
    "assemble": "generation users",
    "index": "indexes seconds",
    "quantize": "models probe seconds",
    "load": "generation bytes loaded_bytes seconds",
    "verify": "generation gates verified not_judged",
    "publish": "generation epoch previous changed",
    "warm": "generation replicas waiting seconds skew_ms lag_ms",
    "retire": "retired spared keys rows leftovers erasures_pending exposure_parts events_trimmed",
}
"""Step -> fields of its result in their order."""

REPORTS = {
    "begin": (
        "answers_without_history attributes base bounds bundle_digest bundle_files cut erased featured featured_users "
        "inputs inputs_digest interactions item_seed items items_without_vector kept late oldest_late_us remarks rows "
        "seconds settings unknown_items unlisted_items unusable user_seed user_values user_vectors users"
    ),
    "embed_items": "base changes computed_by copied dims items regrouped seconds",
    "shard-0001": "began_at computed_by ended_at items shard users",
    "assemble": "users_scored",
    "index": "indexes seconds",
    "quantize": "models probe seconds",
    "load": "seconds",
    "verified": "baseline run_ids",
}  # fmt: skip
"""Report -> its fields in the file, which has them in order."""

PARTS = {
    ("begin", "base"): "generation has_lists read_because took_over why",
    ("begin", "rows"): "early newest_us untimed user_rows",
    ("begin", "inputs", 0): "name sha256 size_bytes",
    ("begin", "unusable", "interactions"): "left_out reasons rows",
    ("shard-0001", "users"): (
        "directory entities inputs reasons scored seconds seen short tables unusable without_input"
    ),
    ("shard-0001", "users", "directory"): "path sha256 size_bytes",
    ("shard-0001", "users", "tables", "user_topk"): "count file sums",
    ("shard-0001", "items"): "copied scored seconds tables unusable",
    ("index", "indexes", "inner_product"): "file kind metric recall",
    ("quantize", "models", "user_tower"): "agreement digest fp32 int8 name spec weights",
}
"""Path into the reports -> fields there."""


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return prepare(tmp_path, redis_url, users=200, items=60)


def test_results_and_reports_of_a_night_have_their_fields_in_order(config: NightConfig) -> None:
    # When a night runs to its end
    finished_steps = run_night(Night(config, "attempt", DATA_UNTIL))

    # Then results have the fields that XComs and the shell show, in this order
    assert {name: " ".join(row.step_result) for name, row, _ in finished_steps} == RESULTS

    # And the files in the store have these, and no others
    build = Build(config, config.store(), finished_steps[0][1].step_result["generation"])
    stored: Any = {
        name: orjson.loads(build.store.read(generation_path(build.generation, f"work/{name}.json")) or b"{}")
        for name in REPORTS
    }  # fmt: skip
    assert {name: " ".join(report) for name, report in stored.items()} == REPORTS
    for (name, *keys), fields in PARTS.items():
        part: Any = stored[name]
        for key in keys:
            part = part[key]
        assert " ".join(sorted(part)) == fields, (name, *keys)

    # And a second run of a step returns its report as it was stored
    for name in ("embed_items", "index", "quantize"):
        assert build.read_report(ReportName(name)) == stored[name]


@pytest.mark.parametrize("name", [name for name in REPORTS if "-" not in name])
def test_the_class_of_a_report_has_its_fields(name: str) -> None:
    report_class = {
        "begin": reports.BeginReport, "embed_items": reports.EmbedItemsReport, "assemble": reports.AssembleReport,
        "index": reports.IndexReport, "quantize": reports.QuantizeReport, "load": reports.LoadReport,
        "verified": VerifyReport,
    }[name]  # fmt: skip
    now_and_then = {"events", "events_namespace", "facets", "unknown_items_named"}

    assert {*get_type_hints(report_class)} - now_and_then == {*REPORTS[name].split()}
