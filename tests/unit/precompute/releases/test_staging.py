from collections.abc import Iterator

import pytest
import redis

from cache.control.control_keys import Control
from cache.format.redis_keys import Keyspace
from cache.store.releases import Canary, Pointer
from precompute.releases.staging import StagingNote

FIRST_GENERATION, TWO = "20260131T000000Z-aaaaaaaaaaaa", "20260201T000000Z-bbbbbbbbbbbb"


@pytest.fixture
def control(redis_url: str, keyspace: Keyspace) -> Iterator[Control]:
    with redis.Redis.from_url(redis_url, protocol=3) as client:
        yield Control(client, keyspace)


def test_a_second_publisher_is_refused_with_the_blocking_note(control: Control) -> None:
    stage = StagingNote(control)

    assert stage.set(FIRST_GENERATION, "first") is None
    assert stage.set(FIRST_GENERATION, "a retry under another name") is None
    blocking_note = stage.set(TWO, "second")

    assert blocking_note is not None and blocking_note.generation == FIRST_GENERATION


@pytest.mark.parametrize("canary", [None, Canary(TWO, 5.0, 0.0)])
def test_the_note_of_a_publisher_that_died_after_its_move_is_in_nobodys_way(
    control: Control, canary: Canary | None
) -> None:
    # given: the pointer moved, and the note was not removed
    stage = StagingNote(control)
    staged, other_generation = (FIRST_GENERATION, TWO) if canary is None else (TWO, "20260202T000000Z-cccccccccccc")
    assert stage.set(staged, "dead") is None
    pointer = Pointer(FIRST_GENERATION, 1, None, "dead", published_at=0.0, canary=canary)
    control.client.set(control.keyspace.live, pointer.to_bytes())

    # when, then
    assert stage.set(other_generation, "next") is None
    note = stage.get()
    assert note is not None and note.generation == other_generation


def test_a_retry_takes_the_note_of_the_publisher_that_died_away(control: Control) -> None:
    stage = StagingNote(control)
    assert stage.set(FIRST_GENERATION, "dead") is None

    stage.clear("retry", TWO)
    assert stage.get() is not None
    stage.clear("retry", FIRST_GENERATION)

    assert stage.get() is None
