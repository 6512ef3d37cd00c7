from collections.abc import Iterator

import pytest
import redis

from cache.control.control_keys import Control
from cache.format.redis_keys import Keyspace
from cache.store.releases import Canary, Pointer
from precompute.releases.staging import StagingNote

ONE, TWO = "20260131T000000Z-aaaaaaaaaaaa", "20260201T000000Z-bbbbbbbbbbbb"


@pytest.fixture
def control(redis_url: str, keyspace: Keyspace) -> Iterator[Control]:
    with redis.Redis.from_url(redis_url, protocol=3) as client:
        yield Control(client, keyspace)


def test_one_publisher_at_a_time_is_told_who_is_in_the_way(control: Control) -> None:
    stage = StagingNote(control)

    assert stage.set(ONE, "first") is None
    assert stage.set(ONE, "a retry under another name") is None
    blocking_note = stage.set(TWO, "second")

    assert blocking_note is not None and blocking_note.generation == ONE


@pytest.mark.parametrize("canary", [None, Canary(TWO, 5.0, 0.0)])
def test_the_note_of_a_publisher_that_died_after_its_move_is_in_nobodys_way(
    control: Control, canary: Canary | None
) -> None:
    # given: the pointer moved, the note was not taken away
    stage = StagingNote(control)
    staged, other_generation = (
        (ONE, TWO) if canary is None else (TWO, "20260202T000000Z-cccccccccccc")
    )
    assert stage.set(staged, "dead") is None
    pointer = Pointer(ONE, 1, None, "dead", published_at=0.0, canary=canary)
    control.client.set(control.keys.live, pointer.to_bytes())

    # when, then
    assert stage.set(other_generation, "next") is None
    note = stage.get()
    assert note is not None and note.generation == other_generation


def test_a_retry_takes_the_note_of_the_publisher_that_died_away(control: Control) -> None:
    stage = StagingNote(control)
    assert stage.set(ONE, "dead") is None

    stage.clear("retry", TWO)
    assert stage.get() is not None
    stage.clear("retry", ONE)

    assert stage.get() is None
