"""Nights that take events over have the bytes of nights over the same rows in a file."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from cache.config.events import EventsConfig
from cache.errors import ConfigError
from cache.events.event import Event
from cache.events.position import BEGINNING, Position
from precompute.builds.build import Build, cut_of
from precompute.events import files as event_files
from precompute.events import merging
from precompute.events.files import FOLDER
from precompute.events.stores import Stores
from precompute.steps import begin, take_events
from tests.integration.changed.month import Month, files_of, same_file, scored
from tests.integration.taking.clicking import alone, click, microseconds, some, taken


def same_bytes(ours: Build, theirs: Build) -> list[str]:
    return [
        name for name in files_of(ours.root, theirs.root)
        if not same_file(ours.root / name, theirs.root / name)
    ]  # fmt: skip


def test_events_are_rows_of_a_file_behind_the_teams_own(month: Month) -> None:
    # given: a base, then events in several files, some at the very time of the team's own rows
    own = pq.read_table(month.file(0))
    at = [microseconds(each) for each in own["timestamp"].to_pylist()[:20]]
    ties = [
        Event(f"tie-{number}", at[number], own["user"][number].as_py().encode(), b"nowhere"
              if number % 5 == 0 else own["item"][20 + number].as_py().encode())
        for number in range(20)
    ]  # fmt: skip
    events = [*some(month, "a"), *ties]
    for part in (events[:60], events[60:]):
        click(month.config, part)
        taken(month.config)

    # when
    ours = scored(month.config, month.cut)
    counted = [each for each in events if each.counts]
    rows = pa.table({
        "user": [str(each.user, "utf-8") for each in counted if each.user],
        "item": [str(each.item, "utf-8") for each in counted if each.item],
        "timestamp": pa.array([each.at_us for each in counted], pa.timestamp("us", "UTC")),
    })  # fmt: skip
    whole = pa.concat_tables([own, rows.cast(own.schema)])
    pq.write_table(whole, month.file(0))
    other = alone(month.config, "other")
    theirs = scored(other, month.cut)

    # then
    builds = Build(month.config, month.config.store(), ours), Build(other, other.store(), theirs)
    assert ours != theirs
    assert same_bytes(*builds) == []
    told = [each.need("begin") for each in builds]
    assert told[0]["interactions"] == told[1]["interactions"] == len(whole)
    assert told[0]["unknown_items"] == told[1]["unknown_items"] > 0


def go_through(month: Month, nights: int) -> None:
    """Nights that copy, each with some events (but the second), beside full ones."""
    for number in range(nights):
        month.night = number
        if number % 3 == 2:  # a file of the team comes behind events that were read
            month.a_day()
        click(month.config, some(month, f"n{number}", 12) if number != 1 else [])
        full = taken(month.full)
        generation = month.publish()

        assert month.differences(generation, scored(full, month.cut)) == []
        begun = month.build(generation).need("begin")
        if number:
            assert begun["base"]["took_over"], begun["base"]
            assert month.reasons(generation)["copied"] > 0


def test_nights_that_copy_have_the_bytes_of_full_ones(month: Month) -> None:
    go_through(month, 3)


def test_nights_whose_older_files_were_merged_have_the_bytes_of_full_ones(
    featured: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "AT_ONCE", 2)
    # As if older ones were retired, which takes a minute.
    held = Stores.held
    monkeypatch.setattr(Stores, "held", lambda stores: sorted(held(stores))[-2:])
    ours, theirs = (each.store().folder for each in (featured.config, featured.full))
    assert ours is not None and theirs is not None
    for number in range(4):
        featured.night = number
        click(featured.config, some(featured, f"n{number}", 12))

        generation = featured.publish()

        shutil.copytree(ours / FOLDER, theirs / FOLDER, dirs_exist_ok=True)
        assert featured.differences(generation, scored(featured.full, featured.cut)) == []
    merged, *rest = event_files.taken(featured.config.store())
    assert merged.until is not None and len(rest) == 2


@pytest.mark.storm
def test_a_fortnight_that_copies_has_the_bytes_of_full_nights(month: Month) -> None:
    go_through(month, 14)


def test_a_retry_of_begin_finds_its_own_work(month: Month) -> None:
    config, cut = month.config, month.cut.isoformat()
    click(config, some(month, "a", 5))
    until = take_events.run(config)["events_until"]
    first = begin.run(config, data_until=cut, run_after=None, events_until=until)
    click(config, some(month, "b", 5))
    take_events.run(config)

    again = begin.run(config, data_until=cut, run_after=None, events_until=until)
    newer = begin.run(config, data_until=cut, run_after=None)

    assert again["generation"] == first["generation"] != newer["generation"]


def test_without_events_a_night_is_as_it_was(month: Month) -> None:
    month.configure(events=EventsConfig())
    generation = scored(month.config, month.cut)

    build = month.build(generation)
    rows = pa.ipc.open_stream(build.root / "work/partition/0000.rows").schema.names
    assert rows == ["xxh3(user)", "ordinal", "time"]
    assert "events" not in build.need("begin")
    assert not (build.root / "seen/0000.times").exists()
    with pytest.raises(ConfigError, match="enabled is false"):
        begin.run(
            month.config, data_until=month.cut.isoformat(), run_after=None, events_until="0-0"
        )


def test_a_night_without_a_cut_is_as_new_as_its_events(month: Month) -> None:
    click(month.config, some(month, "a", 3))
    until = take_events.run(month.config)["events_until"]

    found = begin.run(month.config, data_until=None, run_after=None, named="2026-01-01T00:00:00Z")

    moment = int(until.partition("-")[0]) // 1000
    assert Build.of(month.config, found).need("begin")["cut"] is None
    assert cut_of(found["generation"]) == moment


def test_a_night_without_a_cut_is_never_ahead_of_the_clock(month: Month) -> None:
    ahead = Position(4_000_000_000_000, 0)  # a producer gave its own position
    with redis.Redis.from_url(month.config.events_redis, protocol=3) as client:
        (event,) = some(month, "a", 1)
        client.xadd(month.config.keyspace().events, {"e": event.to_bytes()}, id=str(ahead))
        now = client.time()[0]
    until = take_events.run(month.config)["events_until"]

    found = begin.run(month.config, data_until=None, run_after=None, named="2026-01-01T00:00:00Z")

    assert until == str(ahead)
    assert now <= cut_of(found["generation"]) <= now + 3_600


def test_the_first_night_stands_at_the_beginning(featured: Month) -> None:
    begun = featured.build(scored(featured.config, featured.cut)).need("begin")

    assert begun["events"] == {"until": str(BEGINNING), "files": 0}
