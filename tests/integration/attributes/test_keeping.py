"""What an event set counts for some days; then the team's table does, in each night of that cut alike."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.format.ids import hash_id
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.config.settings import NightConfig
from precompute.partitions.catalogue import open_items
from precompute.steps import begin, take_events
from precompute.steps.night import Night
from tests.integration import nights
from tests.integration.attributes.test_night import contents, prepared, rows_of
from tests.integration.changed.worlds import other_database
from tests.integration.taking.clicking import alone
from tests.integration.taking.test_inputs import inputs_of

DAY = "2026-02-{:02d}T{:02d}:00:00Z"
SET_AT = datetime(2026, 2, 9, 10, tzinfo=UTC)


def set_values(config: NightConfig, events: list[Event]) -> None:
    """Events in the stream, as they were accepted then."""
    with redis.Redis.from_url(config.events_redis_url, protocol=3) as client:
        for number, event in enumerate(events):
            position = f"{int(SET_AT.timestamp() * 1000)}-{number}"
            client.xadd(config.keyspace().events, {"e": event.to_bytes()}, id=position)


def test_a_value_counts_for_as_many_days_as_are_set(tmp_path: Path, redis_url: str) -> None:
    config = prepared(tmp_path, redis_url)
    events = EventsConfig(enabled=True, keep_values_days=3.0)
    config = replace(config, events=events, events_url=redis_url)
    user, item = rows_of(config, "users.parquet")[3], rows_of(config, "items.parquet")[1]
    country = (user["country"] + 1) % 5
    set_values(config, [
        Event("a", 0, user["user"].encode(), None, attributes={"country": country}),
        Event("b", 0, None, item["item"].encode(), attributes={"stock": not item["stock"]}),
    ])  # fmt: skip
    take_events.run(config)
    countries, stock_row_counts = [], []

    for cut in (DAY.format(10, 0), DAY.format(12, 9), DAY.format(12, 11), DAY.format(20, 0)):
        full = replace(alone(config, f"full-{cut[8:13]}"), redis_url=other_database(redis_url))
        events_folder, theirs = (
            config.path(night_config.artifacts) / config.namespace / "events" for night_config in (config, full)
        )
        shutil.copytree(events_folder, theirs)
        generation = nights.publish_night(config, cut)
        manifest = read_manifest(config.store(), generation)
        hash_ = hash_id(user["user"].encode(), manifest.entity_sets["user"].seed)
        countries.append(inputs_of(config, generation)[1][hash_].features["country"])
        stock_row_counts.append(manifest.facts["unusable"].get("events.stock", {}).get("rows", 0))
        # A night with the same cut that copies nothing has the same bytes.
        assert nights.build_verified(full, cut) == generation
        assert contents(config, generation) == contents(full, generation)

    assert countries == [country, country, user["country"], user["country"]]
    assert stock_row_counts == [1, 1, 0, 0]


def test_an_item_that_events_brought_is_in_nights_for_as_many_days_and_reported_while_no_table_has_it(
    tmp_path: Path, redis_url: str
) -> None:
    config = prepared(tmp_path, redis_url)
    events = EventsConfig(enabled=True, keep_values_days=3.0)
    config = replace(config, events=events, events_url=redis_url)
    rows = rows_of(config, "items.parquet")
    looks_vector = (0.5,) * 16
    new = {"item": "new", "looks": list(looks_vector), "stock": True, "brand": "acme"}
    set_values(config, [
        Event("a", 0, None, b"new", features={"looks": looks_vector}, attributes={"stock": True}),
        Event("b", 0, None, rows[0]["item"].encode(), features={"looks": looks_vector}),
    ])  # fmt: skip
    take_events.run(config)
    unlisted_counts, catalogued_flags, remark_flags = [], [], []

    def record_begin(cut: str) -> None:
        row = begin.in_night(Night(config, "a", data_until=cut))
        build = Build(config, config.store(), row.step_result["generation"])
        begin_report = build.need_report(BEGIN_REPORT)
        unlisted_counts.append(begin_report["unlisted_items"])
        catalogued_flags.append(open_items(build.root, begin_report).ordinal_of(b"new") >= 0)
        remark_flags.append("are in no table: 1; each is removed 3 days" in row.result_summary)

    for day, hour in ((10, 0), (12, 9), (12, 11)):
        record_begin(DAY.format(day, hour))
    table = config.path("items.parquet")
    full_table = pa.Table.from_pylist([*rows, new], pq.read_schema(table))
    pq.write_table(full_table, table)
    record_begin(DAY.format(12, 9))

    assert (unlisted_counts, catalogued_flags) == ([1, 1, 0, 0], [True, True, False, True])
    assert remark_flags == [True, True, False, False]
