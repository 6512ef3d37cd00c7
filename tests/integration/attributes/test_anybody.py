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
    """Events that say nothing usable: values of no kind that is wanted, and clicks on what nobody knows."""
    users = [row["user"].encode() for row in rows_of(config, "users.parquet")]
    items = [row["item"].encode() for row in rows_of(config, "items.parquet")]
    values: list[tuple[bytes | None, bytes | None, dict[str, Any]]] = [
        (None, items[0], {"stock": "much"}), (None, items[1], {"stock": 7, "brand": 7}),
        (None, items[2], {"looks": [0.5] * 3}), (None, items[3], {"looks": "good"}),
        (None, items[4], {"looks": None}), (users[0], None, {"country": "far"}), (users[1], None, {"country": [2]}),
    ]  # fmt: skip
    events = [Event("", 0, user, item, attributes=each) for user, item, each in values]
    events += [Event("", 0, b"stranger-%d" % each, b"nowhere") for each in range(STRANGERS)]
    # Of whom a value is usable, but who did nothing: no list is asked for.
    events += [
        Event("", 0, b"new-%d" % each, attributes={"country": 2}) for each in range(STRANGERS)
    ]
    return [replace(each, id=f"e{number}") for number, each in enumerate(events)]


def test_wrong_events_are_told_and_refuse_no_night(tmp_path: Path, redis_url: str) -> None:
    config = prepared(tmp_path, redis_url)
    gates = replace(config.gates, unusable_rows=0.001, coverage_of_source=0.95)
    events = EventsConfig(enabled=True)
    config = replace(config, events=events, events_url=redis_url, gates=gates)
    click(config, wrong(config))
    take_events.run(config)

    generation = nights.publish_night(config, FIRST)

    facts = read_manifest(config.store(), generation).facts
    assert facts["users_in_source"] == 120
    told = {name: each["left_out"] for name, each in facts["unusable"].items()}
    assert {name: rows for name, rows in told.items() if rows} == {
        "events.stock": 2, "events.brand": 1, "events.looks": 2, "events.item_features": 3, "events.country": 2,
    }  # fmt: skip
