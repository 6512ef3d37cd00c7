"""Nights that take events over have the bytes of nights over the same rows in a file."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from cache.config.events import EventsConfig
from cache.errors import ConfigError
from cache.events.event import Event
from cache.format.stream_position import STREAM_BEGINNING, Position
from precompute.builds.build import Build, data_until_of
from precompute.builds.reports import BEGIN_REPORT
from precompute.events import files as event_files
from precompute.events import stream
from precompute.events.files import EVENTS_FOLDER
from precompute.events.stream import EventStores
from precompute.steps import begin, take_events
from tests.integration.changed.month import Month, files_of, same_file, scored
from tests.integration.taking.clicking import alone, click, draw_mixed_events, microseconds, take_all_events


def same_bytes(first_build: Build, theirs: Build) -> list[str]:
    return [
        name for name in files_of(first_build.root, theirs.root)
        if not same_file(first_build.root / name, theirs.root / name)
    ]  # fmt: skip


def test_events_are_rows_of_a_file_behind_the_teams_own(month: Month) -> None:
    # given: a base, then events in several files, some with exactly the time of a row of the team
    team_rows = pq.read_table(month.file(0))
    at = [microseconds(moment) for moment in team_rows["timestamp"].to_pylist()[:20]]
    ties = [
        Event(f"tie-{number}", at[number], team_rows["user"][number].as_py().encode(), b"nowhere"
              if number % 5 == 0 else team_rows["item"][20 + number].as_py().encode())
        for number in range(20)
    ]  # fmt: skip
    events = [*draw_mixed_events(month, "a"), *ties]
    for part in (events[:60], events[60:]):
        click(month.config, part)
        take_all_events(month.config)

    # when
    event_generation = scored(month.config, month.cut)
    counting_events = [event for event in events if event.is_in_history]
    rows = pa.table({
        "user": [str(event.user, "utf-8") for event in counting_events if event.user],
        "item": [str(event.item, "utf-8") for event in counting_events if event.item],
        "timestamp": pa.array([event.at_us for event in counting_events], pa.timestamp("us", "UTC")),
    })  # fmt: skip
    all_rows = pa.concat_tables([team_rows, rows.cast(team_rows.schema)])
    pq.write_table(all_rows, month.file(0))
    file_config = alone(month.config, "other")
    theirs = scored(file_config, month.cut)

    # then
    builds = (
        Build(month.config, month.config.store(), event_generation),
        Build(file_config, file_config.store(), theirs),
    )
    assert event_generation != theirs
    assert same_bytes(*builds) == []
    begin_reports = [build.need_report(BEGIN_REPORT) for build in builds]
    assert begin_reports[0]["interactions"] == begin_reports[1]["interactions"] == len(all_rows)
    assert begin_reports[0]["unknown_items"] == begin_reports[1]["unknown_items"] > 0


def go_through(month: Month, nights: int) -> None:
    """Nights that copy, each with some events (but the second), beside full ones."""
    for number in range(nights):
        month.night = number
        if number % 3 == 2:  # a file of the team comes behind events that were read
            month.a_day()
        click(month.config, draw_mixed_events(month, f"n{number}", 12) if number != 1 else [])
        full = take_all_events(month.full)
        generation = month.publish()

        assert month.differences(generation, scored(full, month.cut)) == []
        begin_report = month.build(generation).need_report(BEGIN_REPORT)
        if number:
            assert begin_report["base"]["took_over"], begin_report["base"]
            assert month.reasons(generation)["copied"] > 0


def test_nights_that_copy_have_the_bytes_of_full_ones(month: Month) -> None:
    go_through(month, 3)


def test_nights_whose_older_files_were_merged_have_the_bytes_of_full_ones(
    featured: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FILES_PER_MERGE", 2)
    # Act as if older generations were retired, which takes a minute.
    original_method = EventStores.iter_generation_positions
    monkeypatch.setattr(EventStores, "iter_generation_positions", lambda stores: sorted(original_method(stores))[-2:])
    copying_folder, theirs = (config.store().local_folder for config in (featured.config, featured.full))
    assert copying_folder is not None and theirs is not None
    for number in range(4):
        featured.night = number
        click(featured.config, draw_mixed_events(featured, f"n{number}", 12))

        generation = featured.publish()

        shutil.copytree(copying_folder / EVENTS_FOLDER, theirs / EVENTS_FOLDER, dirs_exist_ok=True)
        assert featured.differences(generation, scored(featured.full, featured.cut)) == []
    merged, *remaining_files = event_files.list_taken_files(featured.config.store())
    assert merged.until_position is not None and len(remaining_files) == 2


@pytest.mark.storm
def test_a_fortnight_that_copies_has_the_bytes_of_full_nights(month: Month) -> None:
    go_through(month, 14)


def test_a_retry_of_begin_finds_its_own_work(month: Month) -> None:
    config, cut = month.config, month.cut.isoformat()
    click(config, draw_mixed_events(month, "a", 5))
    until_position = take_events.run(config)["events_until"]
    first = begin.run(config, data_until=cut, run_after=None, events_until=until_position)
    click(config, draw_mixed_events(month, "b", 5))
    take_events.run(config)

    repeated_build = begin.run(config, data_until=cut, run_after=None, events_until=until_position)
    later_build = begin.run(config, data_until=cut, run_after=None)

    assert repeated_build["generation"] == first["generation"] != later_build["generation"]


def test_without_events_a_night_is_as_it_was(month: Month) -> None:
    month.configure(events=EventsConfig())
    generation = scored(month.config, month.cut)

    build = month.build(generation)
    rows = pa.ipc.open_stream(build.root / "work/partition/0000.rows").schema.names
    assert rows == ["xxh3(user)", "ordinal", "time"]
    assert "events" not in build.need_report(BEGIN_REPORT)
    assert not (build.root / "seen/0000.times").exists()
    with pytest.raises(ConfigError, match="enabled is false"):
        begin.run(month.config, data_until=month.cut.isoformat(), run_after=None, events_until="0-0")


def test_a_night_without_a_cut_is_as_new_as_its_events(month: Month) -> None:
    click(month.config, draw_mixed_events(month, "a", 3))
    until_position = take_events.run(month.config)["events_until"]

    build = begin.run(month.config, data_until=None, run_after=None, named="2026-01-01T00:00:00Z")

    moment = int(until_position.partition("-")[0]) // 1000
    assert Build.of(month.config, build).need_report(BEGIN_REPORT)["cut"] is None
    assert data_until_of(build["generation"]) == moment


def test_a_night_without_a_cut_is_never_ahead_of_the_clock(month: Month) -> None:
    ahead = Position(4_000_000_000_000, 0)  # a producer gave its own position
    with redis.Redis.from_url(month.config.events_redis_url, protocol=3) as client:
        (event,) = draw_mixed_events(month, "a", 1)
        client.xadd(month.config.keyspace().events, {"e": event.to_bytes()}, id=str(ahead))
        redis_now_s = client.time()[0]
    until_position = take_events.run(month.config)["events_until"]

    build = begin.run(month.config, data_until=None, run_after=None, named="2026-01-01T00:00:00Z")

    assert until_position == str(ahead)
    assert redis_now_s <= data_until_of(build["generation"]) <= redis_now_s + 3_600


def test_the_first_night_stands_at_the_beginning(featured: Month) -> None:
    begin_report = featured.build(scored(featured.config, featured.cut)).need_report(BEGIN_REPORT)

    assert begin_report["events"] == {"until": str(STREAM_BEGINNING), "files": 0}
