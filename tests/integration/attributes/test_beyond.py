"""Values beyond what a model takes: those of events are left out and told, those of the team's own tables are named."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.config.events import EventsConfig
from cache.errors import SourceError, StoreError
from cache.events.event import Event
from cache.format.manifest import Manifest
from cache.store.artefacts import read_manifest
from precompute.config.settings import NightConfig
from precompute.events import event_trials
from precompute.sources.readers import read_features
from precompute.steps import begin, embed_items, score, take_events
from tests.integration import nights
from tests.integration.attributes.test_night import FIRST, contents, prepared, rows_of, with_changed_tables
from tests.integration.taking.clicking import click

HUGE = 3e38


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    """A night of strict gates that takes events over."""
    prepared_config = prepared(tmp_path, redis_url)
    gates = replace(prepared_config.gates, unusable_rows=0.001, coverage_of_source=0.95)
    return replace(prepared_config, events=EventsConfig(enabled=True), events_url=redis_url, gates=gates)


def sets(config: NightConfig, users: Mapping[int, Any], items: Mapping[int, Any]) -> list[Event]:
    """Events that set these users' countries, and these items' looks."""
    named = [rows_of(config, f"{name}.parquet") for name in ("users", "items")]
    events = [
        Event("", 0, named[0][row]["user"].encode(), None, attributes={"country": value})
        for row, value in users.items()
    ]
    events += [
        Event("", 0, None, named[1][row]["item"].encode(), attributes={"looks": value}) for row, value in items.items()
    ]
    return [replace(event, id=f"e{number}") for number, event in enumerate(events)]


def left_out(manifest: Manifest) -> dict[str, int]:
    left_out_counts = {name: unusable_rows["left_out"] for name, unusable_rows in manifest.facts["unusable"].items()}
    return {name: rows for name, rows in left_out_counts.items() if rows}


def test_values_of_events_that_a_model_cannot_take_cost_no_other_entity_anything(config: NightConfig) -> None:
    good = sets(config, {5: 2, 6: 0}, {7: [0.5] * 16})
    unusable_events = sets(config, {0: 2**40, 1: -9, 2: 5}, {0: [HUGE] * 16, 1: [1e30] * 16})
    unusable_events += [
        Event("both", 0, None, unusable_events[-1].item, attributes={"looks": [HUGE] * 16, "stock": False})
    ]
    click(config, [*good, *(replace(event, id=f"bad-{event.id}") for event in unusable_events)])
    take_events.run(config)

    generation_id = nights.publish_night(config, FIRST)

    manifest = read_manifest(config.store(), generation_id)
    assert left_out(manifest) == {"events.user_tower": 3, "events.item_tower": 2}
    reasons = manifest.facts["unusable"]["events.user_tower"]["reasons"]
    assert [*reasons] == [event_trials.MODEL_RAISES_REASON]
    # Expect the tables' own values, except that filters see the attributes that the event set.
    stock = Event("stock", 0, None, unusable_events[-1].item, attributes={"stock": False})
    changed_config = with_changed_tables(config, [*good, stock])
    expected_contents = contents(changed_config, nights.publish_night(changed_config, FIRST))
    event_contents = contents(config, generation_id)
    for name in ("tables", "entity_sets", "items", "filters", "seen"):
        assert event_contents[name] == expected_contents[name], name


def test_values_that_only_real_inputs_overflow_are_reported_and_refuse_nothing(
    config: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    click(config, sets(config, {}, {row: [HUGE] * 16 for row in range(9)}))
    take_events.run(config)
    monkeypatch.setattr(event_trials, "_usable_values", lambda *args: args[3])

    generation_id = nights.publish_night(config, FIRST)

    assert left_out(read_manifest(config.store(), generation_id)) == {"events.outputs of item_tower": 9}


def test_a_value_of_the_teams_own_is_named_with_its_user_and_column(config: NightConfig) -> None:
    rows = rows_of(config, "users.parquet")
    rows[17]["country"] = 2**40
    table = pq.read_table(config.path("users.parquet"))
    pq.write_table(pa.Table.from_pylist(rows, table.schema), config.path("users.parquet"))
    take_events.run(config)
    build = begin.run(config, data_until=FIRST, run_after=None)
    embed_items.run(config, build)

    with pytest.raises(SourceError, match=f"user '{rows[17]['user']}'.*country {2**40}"):
        score.run(config, build, build["shards"])


def test_a_table_that_is_written_over_while_events_are_tried_is_no_damage_but_a_night_to_repeat(
    config: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    click(config, sets(config, {}, {7: [0.5] * 16}))
    take_events.run(config)
    table = config.path("items.parquet")

    def half_written(*args: Any, **more: Any) -> Any:
        table.write_bytes(table.read_bytes()[:-40])
        return read_features(*args, **more)

    monkeypatch.setattr(event_trials, "read_features", half_written)

    with pytest.raises(StoreError, match=r"changed while .* run the night again"):
        begin.run(config, data_until=FIRST, run_after=None)
