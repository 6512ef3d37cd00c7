"""What is left of events once nights have them, and of those who are erased."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from cache.events.event import Event
from cache.format.stream_position import Position
from cache.store.artefacts import read_manifest
from cache.store.erasures import all_erasures, request_erasure
from precompute.events.files import event_files
from precompute.events.stream import read_entries
from precompute.steps import retire, take_events
from tests.integration.changed.month import Month
from tests.integration.taking.clicking import click, draw_mixed_events


def test_retire_trims_what_every_generation_has(featured: Month) -> None:
    # given: three nights whose events may be trimmed at once
    month = featured
    events = replace(month.config.events, keep_s=1e-9)
    month.configure(events=events, keep=1, superseded_grace_s=0.0)
    positions = []
    for number in range(3):
        month.night = number
        positions.append(click(month.config, draw_mixed_events(month, f"n{number}", 4))[-1])
        month.publish()

    # then: the stream begins after the position of the oldest remaining generation
    store = month.config.store()
    generation_events = [read_manifest(store, generation).events for generation in store.names("generations")]
    oldest = min(Position.parse(events_read.until) for events_read in generation_events if events_read is not None)
    stream = month.config.keyspace().events
    client = redis.Redis.from_url(month.config.events_redis_url, protocol=3)
    remaining_positions = [Position.parse(raw_position) for raw_position, _ in read_entries(client, stream)]
    assert len(generation_events) == 2 and oldest == positions[1]
    assert len(remaining_positions) == 4 and remaining_positions[-1] == positions[2]
    assert retire.run(month.config)["events_trimmed"] == 0


def test_erasing_reaches_files_and_stream_before_it_is_done(featured: Month) -> None:
    month, config = featured, featured.config
    user = "new-somebody"
    month.publish()  # nothing is erased for good from a store without a generation
    old = draw_mixed_events(month, "a", 3)
    click(config, [*old, Event("theirs", 1, user.encode(), month.ids("item")[0].encode())])
    take_events.run(config)
    click(config, [Event("later", 1, user.encode(), month.ids("item")[1].encode())])

    request_erasure(config.store(), user.encode(), "user", requested_at=0.0)
    retire.run(config)

    rows = pa.concat_tables(pq.read_table(event_file) for event_file in event_files(config).files)
    assert set(rows["id"].to_pylist()) == {event.id for event in old}
    assert take_events.run(config)["left_out"] == 0  # there was nothing of theirs left to take
    (erasure,) = all_erasures(config.store())
    assert not erasure.is_pending
