"""What happens between the look and the move of an operation never leads astray."""

from collections.abc import Iterator

import pytest

from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import Conflict
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore
from cache.store.releases import all_releases, done_path
from precompute.releases import moves, sweep
from precompute.releases import recovery as restoring
from precompute.releases.recovery import restore_redis
from precompute.releases.release_log import Releases
from precompute.releases.sweep import retire
from tests.integration.release_world import A, B, C, World, keep_intents, lose_redis, meanwhile, pages_of


@pytest.fixture
def world(tmp_path, redis_url, keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def test_a_publish_that_another_night_of_the_same_generation_made_meanwhile_is_done(world, monkeypatch):
    world.publish(A)
    world.load(B)
    meanwhile(monkeypatch, Control, "move_pointer", lambda: moves.publish(world.releases, B, attempt="other"))

    moved = moves.publish(world.releases, B, attempt="own")

    assert (moved.pointer.generation, moved.pointer.attempt, moved.has_moved) == (B, "other", False)
    assert world.live() == moved.pointer


def test_a_publish_beside_one_of_another_generation_is_refused(world, monkeypatch):
    world.publish(A)
    world.load(B)
    world.load(C)
    meanwhile(monkeypatch, Control, "move_pointer", lambda: moves.publish(world.releases, C, attempt="other"))

    with pytest.raises(Conflict, match="moved the pointer"):
        moves.publish(world.releases, B, attempt="own")
    assert world.live().generation == C


def test_a_restore_never_undoes_a_roll_back_made_while_it_streams(world, monkeypatch):
    world.publish(A, B)

    def roll_back():
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")

    meanwhile(monkeypatch, restoring, "reload", roll_back)
    pointer, loaded, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    assert pointer == world.live() and pointer.generation == A and loaded == [A]
    assert world.control.rows()[B].state is GenerationState.ROLLED_BACK
    assert world.releases.ledger().state(B) is GenerationState.ROLLED_BACK


def test_two_restores_at_once_end_with_one_pointer(world, monkeypatch):
    world.publish(A, B)
    lose_redis(world)

    def restore_concurrently():
        restore_redis(world.releases, attempt="other", chunk_bytes=1000)

    meanwhile(monkeypatch, restoring, "reload", restore_concurrently)
    pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
    assert pointer == world.live() and pointer.attempt == "other"


def test_older_data_is_not_published_over_newer_by_a_publisher_that_looked_earlier(world, monkeypatch):
    world.publish(A)
    world.load(B)
    world.load(C)

    def publish_newer():
        moves.publish(world.releases, C, attempt="other")

    meanwhile(monkeypatch, moves, "load_missing", publish_newer)
    with pytest.raises(Conflict, match="older than"):
        moves.publish(world.releases, B, attempt=world.attempt())
    assert world.live().generation == C and world.control.rows()[C].state is GenerationState.LIVE


def test_a_roll_back_never_lands_on_a_generation_retired_meanwhile(world, monkeypatch):
    world.publish(A, B, C)

    def retire_target():
        retire(world.releases, A, attempt="sweep")
        world.client.set(world.keys.page(A, "score", 3), b"streamed by the roll back meanwhile")

    meanwhile(monkeypatch, Control, "move_pointer", retire_target)
    with pytest.raises(Conflict, match="state is now retired"):
        moves.roll_back(world.releases, target_generation=A, reason="bad", attempt=world.attempt())
    assert world.live().generation == C and not pages_of(world, A)
    assert world.releases.ledger().state(A) is GenerationState.RETIRED


def test_a_publish_never_lands_on_a_generation_refused_meanwhile(world, monkeypatch):
    world.publish(A)
    world.load(B)

    def refuse_generation():
        moves.refuse(world.releases, B, reason="bad", attempt="gate")

    meanwhile(monkeypatch, Control, "move_pointer", refuse_generation)
    with pytest.raises(Conflict, match="state is now refused"):
        moves.publish(world.releases, B, attempt=world.attempt())
    assert world.live().generation == A


def test_a_refusal_whose_row_redis_lost_holds_off_a_publisher_that_looked_earlier(world, monkeypatch):
    world.publish(A)
    world.load(B)
    verified = world.control.rows()[B]

    def refuse_and_reset_row():
        moves.refuse(world.releases, B, reason="bad", attempt="gate")
        world.control.set_row(B, verified)  # as an older snapshot has it

    meanwhile(monkeypatch, Releases, "record", refuse_and_reset_row)
    with pytest.raises(Conflict, match="it is refused"):
        moves.publish(world.releases, B, attempt=world.attempt())
    assert world.live().generation == A


def test_a_refusal_whose_row_redis_lost_while_it_was_written_down_is_marked_again(world, monkeypatch):
    world.publish(A)
    world.load(B)
    verified = world.control.rows()[B]
    meanwhile(monkeypatch, Releases, "record", lambda: world.control.set_row(B, verified))
    moves.refuse(world.releases, B, reason="bad", attempt="gate")
    assert world.control.rows()[B].state is GenerationState.REFUSED


def test_a_restore_does_not_lift_a_refusal_that_is_yet_to_be_written_down(world, monkeypatch):
    world.publish(A, B)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    world.releases.mark_verified(B, attempt="again")  # the records prove it verified from here on

    def restore_then_publish():
        restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
        with pytest.raises(Conflict, match="it is refused"):
            moves.publish(world.releases, B, attempt="publish")

    meanwhile(monkeypatch, world.releases, "_write_state", restore_then_publish)
    moves.refuse(world.releases, B, reason="bad again", attempt="verify")
    assert world.live().generation == A
    assert world.releases.ledger().state(B) is GenerationState.REFUSED


def test_a_generation_made_live_meanwhile_is_not_retired(world, monkeypatch):
    world.publish(A, B, C)

    def roll_back():
        moves.roll_back(world.releases, target_generation=A, reason="bad", attempt="operator")

    meanwhile(monkeypatch, sweep, "_demand_unneeded", roll_back)
    with pytest.raises(Conflict):
        retire(world.releases, A, attempt="sweep")
    assert world.live().generation == A and len(pages_of(world, A)) == 10
    assert world.control.rows()[A].state is GenerationState.LIVE


@pytest.mark.parametrize("when", ["before the mark", "after the mark"])
def test_a_pin_or_a_reader_that_comes_late_still_stops_a_retirement(world, monkeypatch, when):
    world.publish(A, B, C)

    def pin():
        world.releases.record("pin", A, attempt="auditor", reason="audit")

    if when == "before the mark":
        pin()
    else:
        meanwhile(monkeypatch, Control, "write_rows", pin)
    with pytest.raises(Conflict, match="pinned"):
        retire(world.releases, A, attempt="sweep")
    world.releases.unpin(A, attempt="auditor")
    beat = b'{"replica":"r1","serving":"%s","holds":[]}' % A.encode()
    world.client.zadd(world.keys.replicas, {beat: world.clock()})
    with pytest.raises(Conflict, match="holds it"):
        retire(world.releases, A, attempt="sweep")
    assert len(pages_of(world, A)) == 10 and world.releases.state(A) is GenerationState.SUPERSEDED


def test_a_move_overtaken_before_it_was_written_down_as_done_is_not_forgotten(world, monkeypatch):
    """A publisher dies right after its move; the next one settles that before it moves on."""
    world.publish(A)
    world.load(B)

    def die(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
        with pytest.raises(KeyboardInterrupt):
            moves.publish(world.releases, B, attempt="dies")
    died = world.live()
    intent = all_releases(world.store)[-1]
    assert died.generation == B and (intent.epoch, intent.is_done) == (died.epoch, False)

    world.publish(C)

    assert world.store.read(done_path(intent.number)) is not None
    ledger = world.releases.ledger()
    assert (ledger.live_generation, ledger.previous_generation, ledger.state(B)) == (C, B, GenerationState.SUPERSEDED)
    assert world.live().previous == B


def test_a_mover_that_looked_before_anothers_move_never_replaces_it(world, monkeypatch):
    """Nobody can overtake a move whose intent is still open: the look and the compare-and-set share one epoch."""
    world.publish(A)
    world.load(B)
    world.load(C)

    def publish_and_die():
        def die(*_arguments, **_options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
            with pytest.raises(KeyboardInterrupt):
                moves.publish(world.releases, B, attempt="dies")

    meanwhile(monkeypatch, Control, "move_pointer", publish_and_die)
    with pytest.raises(Conflict, match="another publisher"):
        moves.publish(world.releases, C, attempt="late")
    assert world.live().generation == B
    moves.publish(world.releases, C, attempt="late")
    written = [(record.generation, record.is_done) for record in all_releases(world.store)]
    assert written == [(A, True), (C, False), (B, True), (C, True)]
