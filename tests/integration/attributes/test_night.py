"""A night over tables and events that set attributes is the night over the tables with these values, byte by byte."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.events.event import Event
from cache.format.manifest import Manifest
from cache.format.stream_position import Position
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.config.settings import FacetConfig, FilterConfig, NightConfig, TableConfig
from precompute.events.files import EventValues
from precompute.reuse.inputs import VALUES_REASON
from tests.integration import nights
from tests.integration.changed.worlds import LENIENT
from tests.integration.feature_towers import COUNTRIES, from_history_and_country, vectors_column, with_towers
from tests.opened import open_generation

ATTRIBUTES = ("stock", "brand")
FIRST, SECOND = "2026-02-10T00:00:00Z", "2026-02-11T00:00:00Z"
"""Cuts behind all clicks: a base that leaves none out may be taken over."""
JUST_BEFORE = Position(1_770_681_600_000, 0)


def prepared(folder: Path, redis_url: str) -> NightConfig:
    """A night whose users have a country, its items looks and attributes."""
    config = nights.prepare(folder, redis_url, users=120, items=60)
    users = sorted(nights.histories(config))
    countries = pa.array([row % COUNTRIES for row in range(len(users))], pa.int64())
    pq.write_table(pa.table({"user": users, "country": countries}), config.path("users.parquet"))
    items = pq.read_table(config.path("items.parquet"))["item"].to_pylist()
    pq.write_table(
        pa.table({
            "item": items, "looks": vectors_column(len(items), 3),
            "stock": [at % 3 > 0 for at in range(len(items))],
            "brand": [("acme", "best")[at % 2] for at in range(len(items))],
        }),
        config.path("items.parquet"),
    )  # fmt: skip
    with_towers(config, from_history_and_country)
    kinds = ("user_topk", "user_vector", "item_vector", "item_similar")
    return replace(
        config,
        sources=replace(config.sources, user_features="users.parquet", item_attributes=ATTRIBUTES),
        tables={name: TableConfig(name, k=10) for name in kinds},  # type: ignore[arg-type]
        filters={"in_stock": FilterConfig({"==": ["stock", True]}, ("user_topk",))},
        facets={"brands": FacetConfig("brand", 5)},
        gates=LENIENT,
    )


def rows_of(config: NightConfig, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(config.path(name)).to_pylist()
    return rows


def make_value_events(config: NightConfig) -> list[Event]:
    """Events that set values of users and items, some twice, some to what they were."""
    users = [row["user"].encode() for row in rows_of(config, "users.parquet")]
    items = [row["item"].encode() for row in rows_of(config, "items.parquet")]
    events = [
        *(Event("", 0, raw, None, attributes={"country": 9}) for raw in users[:3]),
        *(Event("", 0, raw, None, attributes={"country": 1, "mood": "glad"}) for raw in users[:12]),
        Event("", 0, b"somebody-new", None, attributes={"country": 2}),
        *(Event("", 0, None, raw, attributes={"stock": False}) for raw in items[:20]),
        *(Event("", 0, None, raw, attributes={"stock": True, "brand": "new"}) for raw in items[5:9]),
        Event("", 0, None, items[30], attributes={"looks": [0.5] * 16}),
        Event("", 0, None, items[31], attributes={"brand": None}),
        Event("", 0, None, b"no-such-item", attributes={"stock": True}),
    ]  # fmt: skip
    return [replace(event, id=f"e{number}") for number, event in enumerate(events)]


def write_events(path: Path, events: Iterable[Event]) -> None:
    """A file of events as nights keep them, as far as it is read for attributes."""
    event_texts = [event.to_bytes().decode() for event in events]
    numbers = [Position(JUST_BEFORE.ms, number).number for number in range(len(event_texts))]
    pq.write_table(pa.table({"position": numbers, "event": event_texts}), path)


def with_changed_tables(config: NightConfig, events: Iterable[Event]) -> NightConfig:
    """The same night over tables that have these values, in a namespace of its own."""
    users = {row["user"]: row for row in rows_of(config, "users.parquet")}
    items = {row["item"]: row for row in rows_of(config, "items.parquet")}
    for event in events:
        raw, attributes = event.source_id.decode(), dict(event.attributes or {})
        attributes.pop("mood", None)
        if event.kind == "user":
            users.setdefault(raw, {"user": raw}).update(attributes)
        elif raw in items:
            items[raw].update(attributes)
    for name, rows in (("users", users), ("items", items)):
        schema = pq.read_schema(config.path(f"{name}.parquet"))
        table = pa.Table.from_pylist(list(rows.values()), schema=schema)
        pq.write_table(table, config.path(f"changed-{name}.parquet"))
    sources = replace(config.sources, user_features="changed-users.parquet", item_features="changed-items.parquet")
    return replace(config, namespace=f"{config.namespace}-changed", sources=sources)


def contents(config: NightConfig, generation: str) -> Mapping[str, Any]:
    """Return checksums of a generation's files, except its name, figures and the index."""
    manifest: Manifest = open_generation(config.store(), generation)[0]
    manifest_document: dict[str, Any] = orjson.loads(manifest.to_bytes())
    for name in ("namespace", "generation", "created_at", "inputs_digest", "timings", "facts", "gates"):
        del manifest_document[name]
    for index in manifest_document["indexes"].values():
        del index["file"]
    for model in manifest_document["models"].values():  # seconds are measured beside what it agrees in
        del model["agreement"]
    return manifest_document


def test_a_night_takes_over_what_events_set(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = prepared(tmp_path, redis_url)
    events = make_value_events(config)
    nights.publish_night(config, FIRST)  # a base, in which nothing of this was set
    write_events(config.path("events.parquet"), events)
    read = EventValues.read

    with monkeypatch.context() as patch:
        files = [config.path("events.parquet")]
        patch.setattr(EventValues, "read", lambda _files, *others: read(files, *others))
        generation_id = nights.publish_night(config, SECOND)

    changed_config = replace(with_changed_tables(config, events), reuse="off")
    expected_generation_id = nights.publish_night(changed_config, SECOND)
    assert contents(config, generation_id) == contents(changed_config, expected_generation_id)
    begin_report = Build(config, config.store(), generation_id).need_report(BEGIN_REPORT)
    assert begin_report["base"]["generation"] and begin_report["base"]["read_because"] == VALUES_REASON
