"""Vectors that events brought for new items, in nights of a table of vectors: no event refuses one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.config.events import EventsConfig
from cache.config.night import DEFAULT_BUNDLE
from cache.events.event import Event
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.bundles.bundle_store import bundles_from_tables
from precompute.config.settings import NightConfig, TableConfig
from precompute.erasure.erasing import begin_erasing, settle_erasures
from precompute.events.event_trials import BEYOND_TABLE_REASON, WRONG_WIDTH_REASON
from precompute.releases.release_log import open_releases
from precompute.steps import take_events
from tests.integration import nights
from tests.integration.attributes.test_night import FIRST, SECOND
from tests.integration.taking.clicking import click

DIMS, ITEMS = 12, 40


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    """A night of a table of vectors, with gates that few bad rows refuse."""
    base_config = nights.prepare(tmp_path, redis_url, users=80, items=ITEMS)
    items = pq.read_table(tmp_path / "items.parquet")["item"]
    vectors = np.random.default_rng(5).standard_normal((ITEMS, DIMS)).astype(np.float32)
    column = pa.array(vectors.tolist(), pa.list_(pa.float32()))
    pq.write_table(pa.table({"item": items, "vector": column}), tmp_path / "vectors.parquet")
    tables = {name: TableConfig(name, k=10) for name in ("user_topk", "user_vector")}
    return replace(
        base_config, bundle=DEFAULT_BUNDLE, tables=tables, events=EventsConfig(enabled=True), events_url=redis_url,
        sources=replace(base_config.sources, item_vectors="vectors.parquet"),
        # The gates' own tests cover int8: with so few users, its lists differ by chance.
        gates=replace(base_config.gates, unusable_rows=0.001, coverage_of_source=0.95, skew_overlap=0.0),
    )  # fmt: skip


def make_vector_event(name: str, vector: list[float]) -> Event:
    return Event(name, 0, None, name.encode(), vector=tuple(vector))


def test_vectors_that_would_spoil_lists_and_fold_are_left_out_and_reported(config: NightConfig) -> None:
    known_item = pq.read_table(config.path("vectors.parquet"))["item"][0].as_py()
    click(config, [make_vector_event("new", [0.5] * DIMS), make_vector_event(known_item, [3e38] * DIMS)])
    take_events.run(config)
    first = nights.publish_night(config, FIRST)
    click(config, [
        make_vector_event("far", [1e13] + [0.0] * (DIMS - 1)), make_vector_event("farthest", [3e38] * DIMS),
        make_vector_event("short", [1.0]),
    ])  # fmt: skip
    take_events.run(config)

    second = nights.publish_night(config, SECOND)

    # The item that is now in the table does not count as leaving.
    assert Build(config, config.store(), second).need_report(BEGIN_REPORT)["unlisted_items"] == 1
    manifest_before, after = (read_manifest(config.store(), generation) for generation in (first, second))
    unusable_by_source = after.facts["unusable"]
    assert {
        name: unusable_rows["left_out"]
        for name, unusable_rows in unusable_by_source.items()
        if unusable_rows["left_out"]
    } == {"events.item_vectors": 3}
    reasons = unusable_by_source["events.item_vectors"]["reasons"]
    assert {reason: reason_entry["rows"] for reason, reason_entry in reasons.items()} == {
        BEYOND_TABLE_REASON: 2,
        WRONG_WIDTH_REASON: 1,
    }
    assert manifest_before.items.count == after.items.count == ITEMS + 1
    assert manifest_before.models["user_tower"].digest == after.models["user_tower"].digest


def test_a_bundle_with_the_vector_of_an_erased_item_goes_from_the_store_at_once(config: NightConfig) -> None:
    click(config, [make_vector_event("gone", [0.25] * DIMS), make_vector_event("new", [0.5] * DIMS)])
    take_events.run(config)
    nights.publish_night(config, FIRST)
    store, row = config.store(), np.full(DIMS, 0.25, np.float32).tobytes()
    bundles = store.local("bundles")

    def list_files_with_vector() -> list[Path]:
        files = (path for path in bundles.rglob("*") if path.is_file())
        return [path for path in files if row in path.read_bytes()]

    assert list_files_with_vector()
    begin_erasing(store, b"gone", "item", requested_at=1.0)
    with open_releases(config) as releases:
        settle_erasures(config, releases)
        assert not list_files_with_vector() and not bundles_from_tables(store)
        nights.publish_night(config, SECOND)
        table_bundles = bundles_from_tables(store)
        (standing,) = settle_erasures(config, releases)

    # The first generation still has the item; the bundle of the second one stays.
    assert standing.state == "pending" and len(table_bundles) == 1
    assert bundles_from_tables(store) == table_bundles and not list_files_with_vector()
