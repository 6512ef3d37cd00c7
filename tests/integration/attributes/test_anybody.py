"""Events that anybody sends refuse no night, however wrong they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.store.artefacts import read_manifest
from precompute.config.settings import NightConfig
from precompute.steps import take_events
from tests.integration import nights
from tests.integration.attributes.test_night import FIRST, prepared, rows_of
from tests.integration.taking.clicking import click

STRANGERS = 40


def wrong(config: NightConfig) -> list[Event]:
    """Return events without anything usable: values of unwanted kinds, and clicks on unknown items."""
    users = [row["user"].encode() for row in rows_of(config, "users.parquet")]
    items = [row["item"].encode() for row in rows_of(config, "items.parquet")]
    values: list[tuple[bytes | None, bytes | None, dict[str, Any]]] = [
        (None, items[0], {"stock": "much"}), (None, items[1], {"stock": 7, "brand": 7}),
        (None, items[2], {"looks": [0.5] * 3}), (None, items[3], {"looks": "good"}),
        (None, items[4], {"looks": None}), (users[0], None, {"country": "far"}), (users[1], None, {"country": [2]}),
    ]  # fmt: skip
    events = [Event("", 0, user, item, attributes=attributes) for user, item, attributes in values]
    events += [Event("", 0, b"stranger-%d" % stranger_number, b"nowhere") for stranger_number in range(STRANGERS)]
    # Add users with usable values but without interactions: they get no list.
    events += [
        Event("", 0, b"new-%d" % newcomer_number, attributes={"country": 2}) for newcomer_number in range(STRANGERS)
    ]
    return [replace(event, id=f"e{number}") for number, event in enumerate(events)]


def test_wrong_events_are_reported_and_refuse_no_night(tmp_path: Path, redis_url: str) -> None:
    config = prepared(tmp_path, redis_url)
    gates = replace(config.gates, unusable_rows=0.001, coverage_of_source=0.95)
    events = EventsConfig(enabled=True)
    config = replace(config, events=events, events_url=redis_url, gates=gates)
    click(config, wrong(config))
    take_events.run(config)

    generation = nights.publish_night(config, FIRST)

    facts = read_manifest(config.store(), generation).facts
    assert facts["users_in_source"] == 120
    left_out_counts = {name: unusable_rows["left_out"] for name, unusable_rows in facts["unusable"].items()}
    assert {name: rows for name, rows in left_out_counts.items() if rows} == {
        "events.stock": 2, "events.brand": 1, "events.looks": 2, "events.item_features": 3, "events.country": 2,
    }  # fmt: skip
