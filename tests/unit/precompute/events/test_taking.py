"""Taking over of the stream: every event in exactly one file, whoever crashes or comes second."""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError, CorruptArtefact, TierUnavailable
from cache.events.event import Event
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.erasures import request_erasure
from precompute.config.settings import NightConfig
from precompute.events import stream as stream_of_entries
from precompute.events import taking
from precompute.events.files import event_files, last_taken_position, read_event_interactions, taken_file_path
from precompute.events.stream import take_events
from precompute.partitions.night_input import TakenEvents
from precompute.sources.erasures import ErasedEntities
from precompute.sources.unusable import UnusableRows
from tests.unit.precompute.events.stream import Crash, Stream, TroubledStore

HAPPENINGS = ("add", "take", "crash before", "crash behind", "another before", "another behind", "a few")


def crash() -> None:
    raise Crash


def happen_all(stream: Stream, happenings: Sequence[str]) -> None:
    for happening in happenings:
        happen(stream, happening)


def happen(stream: Stream, happening: str) -> None:
    """One thing that may come to a stream and its takers."""
    other_stream = Stream(stream.client, TroubledStore(stream.store.url), stream.keys, stream.added)
    match happening:
        case "add":
            stream.add()
            return
        case "a few":
            for _ in range(7):
                stream.add()
            return
        case "crash before":
            stream.store.before_write = crash
        case "crash behind":
            stream.store.behind = crash
        case "another before":
            stream.store.before_write = partial(happen_all, other_stream, ("add", "take"))
        case "another behind":
            stream.store.behind = partial(happen_all, other_stream, ("take",))
    with suppress(Crash):
        take_events(stream.store, stream.client, stream.keys)
    stream.store.before_write = stream.store.behind = None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(HAPPENINGS), max_size=14), st.integers(1, 9))
def test_every_event_is_in_exactly_one_file(redis_url: str, happenings: list[str], events_of_a_file: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream_of_entries, "FILE_EVENTS_MAX", events_of_a_file)
        patched.setattr(stream_of_entries, "ENTRIES_AT_ONCE", 3)
        stream = Stream.of(redis_url, Path(folder))

        for happening in happenings:
            happen(stream, happening)
            # the rows taken are always a complete prefix of the stream
            assert stream.rows() == stream.all_rows()[: len(stream.rows())]
        taken_events = take_events(stream.store, stream.client, stream.keys)

        assert stream.rows() == stream.all_rows()
        assert (
            taken_events.until_position == max([*stream.added, STREAM_BEGINNING]) == last_taken_position(stream.store)
        )
        bounds = stream.bounds()
        assert all(end == after for (_, end), (after, _) in pairwise(bounds))
        assert all(after < end for after, end in bounds)
        assert take_events(stream.store, stream.client, stream.keys) == (taken_events.until_position, 0, 0, 0)


def test_what_is_no_event_and_who_is_erased_are_left_out_and_counted(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    stream.add(Event("kept", 1, b"u1", b"i1"))
    stream.add(Event("of-the-user", 1, b"gone", b"i1"))
    stream.add(Event("of-the-item", 1, b"u1", b"away"))
    odd = [b"no event", b'{"id": 5, "at_us": 1, "user": "u"}', b'{"id": "x", "at_us": "now", "user": "u"}']
    last = [stream.client.xadd(stream.keys.events, {"e": payload}) for payload in odd][-1]

    taken_events = take_events(
        stream.store, stream.client, stream.keys,
        erased_entities=ErasedEntities(frozenset({b"gone"}), frozenset({b"away"})),
    )  # fmt: skip

    assert taken_events == (Position.parse(last), 1, 2, 3)
    assert [event_id for _, event_id in stream.rows()] == ["kept"]


def test_a_night_reads_interactions_of_positive_weight_at_their_time(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    config = stream.config(redis_url)
    late = stream.add(Event("a", 1_700_000_000_123_456, "ü".encode(), b"i1", type="buy", weight=2.5))
    stream.add(Event("b", 5, b"u1", b"i1", weight=0.0))
    stream.add(Event("c", 6, b"u1", attributes={"country": "DE"}))
    stream.add(Event("d", 7, item=b"i1", vector=(1.0, 0.5)))
    old = stream.add(Event("e", -8, b"u2", b"i2"))
    take_events(stream.store, stream.client, stream.keys)

    (batch,) = read_event_interactions(event_files(config).files, 0, unusable := UnusableRows())

    assert [batch.user_ids.name_of(row) for row in range(2)] == ["ü", "u2"]
    assert [batch.item_ids.name_of(row) for row in range(2)] == ["i1", "i2"]
    assert batch.times_us.tolist() == [1_700_000_000_123_456, -8]
    assert batch.event_positions is not None and batch.event_positions.tolist() == [late.number, old.number]
    # Events are counted apart from the team's own rows: together, bad rows would be a smaller share.
    assert unusable.to_json() == {"events.interactions": {"rows": 5, "left_out": 0, "reasons": {}}}


def test_a_position_says_which_files_are_read(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    config = stream.config(redis_url)
    assert event_files(config) == event_files(config, "0-0")
    ends = []
    for _ in range(3):
        ends.append(stream.add())
        take_events(stream.store, stream.client, stream.keys)

    file_sets = [event_files(config, str(position)) for position in [STREAM_BEGINNING, *ends]]

    assert [file_set.until_position for file_set in file_sets] == [STREAM_BEGINNING, *ends]
    assert [len(file_set.files) for file_set in file_sets] == [0, 1, 2, 3]
    assert event_files(config) == file_sets[-1]
    for wrong in (stream.add(), Position(ends[0].ms - 1, 0)):
        with pytest.raises(ConfigError, match=f"ends at {wrong}, they go up to {ends[-1]}"):
            event_files(config, str(wrong))


def test_without_events_nothing_is_read_and_a_position_is_refused(tmp_path: Path) -> None:
    config = NightConfig(base=str(tmp_path))

    assert event_files(config).files == () and event_files(config).until_position is None
    with pytest.raises(ConfigError, match="enabled is false"):
        event_files(config, "5-0")
    with pytest.raises(ConfigError, match="enabled is false"):
        taking.run(config)


def test_a_damaged_file_is_named_and_no_event_is_lost_behind_it(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    stream.add()
    stream.store.write(taken_file_path(STREAM_BEGINNING), b"PAR1 and no more")

    with pytest.raises(CorruptArtefact, match=taken_file_path(STREAM_BEGINNING)):
        take_events(stream.store, stream.client, stream.keys)


def test_the_step_never_goes_on_without_the_redis_of_events(tmp_path: Path, redis_url: str) -> None:
    stream = Stream.of(redis_url, tmp_path)
    config = stream.config("unix:///nowhere/redis.sock")

    with pytest.raises(TierUnavailable, match="REDIS_URL"):
        taking.run(config)


def test_a_night_before_the_first_event_says_so() -> None:
    step_result: TakenEvents = {"events_until": "0-0", "events": 0, "left_out": 0, "unreadable": 0}

    assert taking.describe_taken_events(step_result) == "0 events taken over: none was accepted yet"


def test_the_step_leaves_out_who_is_erased_and_tells_where_it_stands(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    config = stream.config(redis_url)
    stream.add(Event("of-them", 1, b"gone", b"i1"))
    last = stream.add()
    request_erasure(config.store(), b"gone", "user", requested_at=0.0)

    step_result = taking.run(config)

    assert step_result == {"events_until": str(last), "events": 1, "left_out": 1, "unreadable": 0}
    assert taking.describe_taken_events(step_result).startswith("1 events taken over, up to 20")
    assert taking.describe_taken_events(step_result).endswith(f"({last}); left out: 1 erased")
