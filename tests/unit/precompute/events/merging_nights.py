"""Nights whose event files are merged, and a store whose user is killed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cache.format.manifest import FORMAT_WITH_EVENTS, IncludedEvents, Manifest
from cache.format.stream_position import Position
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.erasures import request_erasure
from precompute.events.stream import take_events
from tests.life import manifest_of
from tests.unit.precompute.events.stream import Crash, Stream

GENERATION = "20260131T000000Z-0123456789ab"
FILES_PER_MERGE = 4


class Killed(ArtefactStore):
    """Store whose user is killed at the n-th change, before or after it."""

    changes_left = 0
    is_behind = False
    on_change: Callable[[], object] = staticmethod(lambda: None)

    def _step(self, change: Any, *args: Any) -> Any:
        self.changes_left -= 1
        self.on_change()
        if self.changes_left == 0 and not self.is_behind:
            raise Crash
        change_result = change(*args)
        if self.changes_left == 0:
            raise Crash
        return change_result

    def write_once(self, path: str, data: bytes) -> bool:
        return bool(self._step(super().write_once, path, data))

    def delete(self, path: str) -> None:
        self._step(super().delete, path)


def published(stream: Stream, until_position: Position) -> None:
    """Publish a generation with the events up to a position, as the only one."""
    manifest = Manifest.from_bytes(manifest_of(GENERATION, 0))
    manifest_with_events = replace(
        manifest,
        namespace=stream.keys.namespace,
        events=IncludedEvents(str(until_position), 10),
        format=FORMAT_WITH_EVENTS,
    )
    stream.store.write(generation_path(GENERATION, "manifest.json"), manifest_with_events.to_bytes())


def erase(stream: Stream, user: str) -> None:
    """Write an erasure."""
    request_erasure(stream.store, user.encode(), "user", requested_at=0.0)


def nights(stream: Stream, count: int, events: int = 2) -> list[Position]:
    """Run nights that take some events each; return their last positions."""
    ends = []
    for _ in range(count):
        for _ in range(events):
            stream.add()
        ends.append(take_events(stream.store, stream.client, stream.keys).until_position)
    return ends
