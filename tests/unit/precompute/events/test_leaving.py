"""What leaves the stream, and the files: what everybody has, and who is erased."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.config.events import EventsConfig
from cache.errors import TierUnavailable
from cache.events.event import Event
from cache.format.stream_position import Position
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.erasures import Erasure, request_erasure
from precompute.events import taking
from precompute.events.stream import (
    forget_events,
    forget_in_files,
    forget_in_stream,
    read_entries,
    take_events,
    trim_stream,
)
from precompute.sources.erasures import ErasedEntities
from tests.unit.precompute.events.stream import Crash, Stream

GENERATION = "20260131T000000Z-0123456789ab"


@pytest.fixture
def stream(redis_url: str, tmp_path: Path) -> Stream:
    """Six events, of which nights took the first four over."""
    event_stream = Stream.of(redis_url, tmp_path)
    for count in (2, 2):
        for _ in range(count):
            event_stream.add()
        take_events(event_stream.store, event_stream.client, event_stream.keys)
    event_stream.add()
    event_stream.add()
    return event_stream


def begin_generation(stream: Stream, until_position: Position | None) -> None:
    """A generation in the making."""
    begin_report = {} if until_position is None else {"events": {"until": str(until_position), "files": 1}}
    stream.store.write(generation_path(GENERATION, "work/begin.json"), orjson.dumps(begin_report))


def list_stream_positions(stream: Stream) -> list[Position]:
    return [Position.parse(position) for position, _ in read_entries(stream.client, stream.keys.events)]


def trimmed(stream: Stream, keep_s: float = -60.0, stream_bytes: int = 1 << 30) -> int:
    return trim_stream(stream.stores, stream.client, stream.keys, keep_s=keep_s, stream_bytes=stream_bytes)


def test_what_no_file_has_stays(stream: Stream) -> None:
    assert trimmed(stream) == 4

    assert list_stream_positions(stream) == list(stream.added)[4:]
    assert trimmed(stream) == 0


def test_what_is_young_stays(stream: Stream) -> None:
    assert trimmed(stream, keep_s=3_600.0) == 0

    assert list_stream_positions(stream) == list(stream.added)


def test_a_stream_that_is_half_full_keeps_nothing_for_its_age(stream: Stream) -> None:
    taken_up = int(stream.client.memory_usage(stream.keys.events) or 0)
    assert trimmed(stream, keep_s=3_600.0, stream_bytes=2 * taken_up) == 0
    begin_generation(stream, list(stream.added)[2])

    assert trimmed(stream, keep_s=3_600.0, stream_bytes=2 * taken_up - 2) == 3

    assert list_stream_positions(stream) == list(stream.added)[3:]


@pytest.mark.parametrize(("position_index", "trimmed_count"), [(None, 4), (0, 1), (1, 2), (3, 4)])
def test_what_a_generation_does_not_have_stays(stream: Stream, position_index: int | None, trimmed_count: int) -> None:
    begin_generation(stream, None if position_index is None else list(stream.added)[position_index])

    assert trimmed(stream) == trimmed_count
    assert list_stream_positions(stream) == list(stream.added)[trimmed_count:]


def test_a_generation_that_cannot_be_read_keeps_everything(stream: Stream) -> None:
    stream.store.write(generation_path(GENERATION, "manifest.json"), b"{}")

    assert trimmed(stream) == 0


def test_without_files_or_stream_nothing_is_trimmed(redis_url: str, tmp_path: Path) -> None:
    empty = Stream.of(redis_url, tmp_path)

    assert trimmed(empty) == 0


def test_who_is_erased_leaves_files_and_stream(stream: Stream) -> None:
    rows, bounds = stream.rows(), stream.bounds()
    erased = ErasedEntities(frozenset({b"u1"}), frozenset({b"i4"}))
    odd = Event("odd", 1, b"u1", b"i9").to_bytes()
    stream.client.xadd(stream.keys.rejected_events, {"e": odd, "reason": b"too_many"})

    assert forget_in_stream(stream.client, stream.keys, erased) == 3
    assert forget_in_files(stream.store, erased) == 1

    remaining_indices = [index for index in range(6) if index not in (1, 4)]
    assert list_stream_positions(stream) == [list(stream.added)[index] for index in remaining_indices]
    assert stream.rows() == [rows[index] for index in (0, 2, 3)]
    assert stream.bounds() == bounds
    assert stream.client.xlen(stream.keys.rejected_events) == 0
    assert forget_in_stream(stream.client, stream.keys, erased) == 0
    assert forget_in_files(stream.store, erased) == 0
    # and later events are taken from the position reached before
    take_events(stream.store, stream.client, stream.keys)
    assert [event_id for _, event_id in stream.rows()] == ["e0", "e2", "e3", "e5"]


def test_nothing_is_forgotten_quietly_while_the_redis_of_events_is_away(stream: Stream, tmp_path: Path) -> None:
    config = stream.config("unix:///nowhere/redis.sock")
    erasure: Erasure = request_erasure(config.store(), b"u1", "user", requested_at=0.0)

    with pytest.raises(TierUnavailable):
        forget_events(config, [erasure])


class InterruptedStore(ArtefactStore):
    """Store in which another host does something between a file's reading and its writing."""

    then: Callable[[], object] | None = None

    def write(self, path: str, data: bytes) -> None:
        hook, self.then = self.then, None
        if hook is not None:
            hook()
        super().write(path, data)


def test_two_hosts_that_erase_at_once_bring_no_erased_user_back(stream: Stream) -> None:
    interrupted_store = InterruptedStore(stream.store.url)
    first = request_erasure(stream.store, b"u1", "user", requested_at=0.0)

    def another() -> None:
        second = request_erasure(stream.store, b"u0", "user", requested_at=0.0)
        assert forget_in_files(stream.store, ErasedEntities.of([second])) > 0

    interrupted_store.then = another
    forget_in_files(interrupted_store, ErasedEntities.of([first]))

    assert [event_id for _, event_id in stream.rows()] == ["e2", "e3"]


def test_a_night_that_was_killed_before_its_second_look_keeps_no_erased_user(
    stream: Stream, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any, **options: Any) -> None:
        take_events(*args, **options)
        request_erasure(stream.store, b"u4", "user", requested_at=0.0)
        raise Crash

    config = stream.config(redis_url)
    with monkeypatch.context() as patch:
        patch.setattr(taking, "take_events", killed)
        with pytest.raises(Crash):
            taking.run(config)
    assert "e4" in [event_id for _, event_id in stream.rows()]

    taking.run(config)

    assert "e4" not in [event_id for _, event_id in stream.rows()]


@pytest.mark.parametrize("has_url", [True, False])
def test_the_stream_is_erased_from_where_no_events_are_taken_in_any_more(
    stream: Stream, redis_url: str, has_url: bool
) -> None:
    """A URL says that there may be a stream, and so do files."""
    config = stream.config(redis_url)
    url = redis_url if has_url else ""
    config = replace(config, events=EventsConfig(), events_url=url)
    if has_url:
        config = replace(config, artifacts=f"{config.artifacts}/none")  # without files

    forget_events(config, [request_erasure(config.store(), b"u4", "user", requested_at=0.0)])

    assert list_stream_positions(stream) == [
        position for position, event in stream.added.items() if event.user != b"u4"
    ]


def test_an_erased_user_leaves_the_inbox_while_no_night_takes_it_in(stream: Stream) -> None:
    inbox = stream.keys.inbox
    inbox_entries: list[dict[str, str]] = [
        {"user": "u1", "item": "i0", "id": "a"}, {"user": "u2", "item": "i4"}, {"user": "u2", "item": "i0"},
        {"e": '{"user":"u1","item":"i0"}'}, {"e": '{"user":17,"item":"i0"}'}, {"e": '{"user":"u2","item":"i0"}'},
        {"e": "no event"}, {"e": "[]"}, {"item": "i0", "id": "b"},
    ]  # fmt: skip
    for entry in inbox_entries:
        stream.client.xadd(inbox, entry)  # type: ignore[arg-type]
    stream.client.xgroup_create(inbox, "larder", "0")
    stream.client.xreadgroup("larder", "gone", {inbox: ">"}, count=1)  # taken by who died

    erased = ErasedEntities(frozenset({b"u1", b"17"}), frozenset({b"i4"}))
    forgotten_count = forget_in_stream(stream.client, stream.keys, erased)

    assert forgotten_count == 2 + 6  # of the stream and of the inbox
    waiting: Any = stream.client.xrange(inbox)
    assert [fields for _, fields in waiting] == [
        {name.encode(): text.encode() for name, text in inbox_entries[at].items()} for at in (2, 5, 8)
    ]
