"""Canaries and overrides as releases: written down, compared and set, and never what makes anything live."""

from collections.abc import Iterator

import pytest

from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import ConfigError, Conflict
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore
from cache.store.releases import newest_release
from precompute.releases import moves
from precompute.releases.recovery import _describe_ended_canary, _describe_ended_overrides, restore_redis
from precompute.releases.sweep import retire, unneeded_generations
from tests.integration.release_world import A, B, C, World, keep_intents, lose_redis, meanwhile


@pytest.fixture
def world(tmp_path, redis_url, keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


@pytest.fixture
def tried(world: World) -> World:
    """A and B were published, C is tried out on 5 %."""
    world.publish(A, B)
    world.load(C)
    world.clock.now_s += 10
    moves.start_canary(world.releases, C, 5.0, "try")
    return world


def test_a_canary_is_in_the_pointer_under_a_new_epoch_and_makes_nothing_live(tried):
    live, ledger = tried.live(), tried.releases.ledger()
    assert (live.generation, live.previous) == (B, A) and live.canary is not None
    assert (live.canary.generation, live.canary.percent) == (C, 5.0)
    assert (ledger.live_generation, ledger.live_epoch, ledger.canary) == (B, live.epoch, live.canary)
    assert tried.releases.state(C) is GenerationState.VERIFIED and tried.control.rows()[C].state == "verified"
    newest_record = newest_release(tried.store)
    assert newest_record is not None and (newest_record.generation, newest_record.action) == (B, "publish")


def test_a_repeated_start_changes_nothing_and_another_share_does(tried):
    pointer_before = tried.live()
    assert not moves.start_canary(tried.releases, C, 5.0, "try").has_moved and tried.live() == pointer_before
    assert not moves.start_canary(tried.releases, C, 5.0, "other").has_moved and tried.live() == pointer_before
    assert moves.start_canary(tried.releases, C, 10.0, "try").has_moved
    assert tried.live().canary.percent == 10.0 and tried.live().epoch > pointer_before.epoch


@pytest.mark.parametrize("abandon", [False, True])
def test_an_ended_canary_may_be_published_unless_it_was_abandoned(tried, abandon):
    moves.end_canary(tried.releases, "end", "enough", abandon)
    assert tried.live().canary is None and tried.live().generation == B
    with pytest.raises(Conflict, match=r"since then end canary of .* use a new attempt"):
        moves.start_canary(tried.releases, C, 5.0, "try")
    assert moves.end_canary(tried.releases, "end").has_moved is False
    if abandon:
        assert tried.releases.state(C) is GenerationState.ABANDONED
        with pytest.raises(Conflict, match="abandoned"):
            moves.publish(tried.releases, C, attempt="publish")
        tried.releases.mark_verified(C, attempt="again")
    moves.publish(tried.releases, C, attempt="publish")
    assert (tried.live().generation, tried.live().previous) == (C, B)


@pytest.mark.parametrize("how", ["publish", "roll back", "restore"])
def test_every_move_ends_a_canary(tried, how):
    match how:
        case "publish":
            moves.publish(tried.releases, C, attempt="publish")
        case "roll back":
            moves.roll_back(tried.releases, target_generation=None, reason="bad", attempt="operator")
        case _:
            lose_redis(tried)
            restore_redis(tried.releases, attempt="restore", chunk_bytes=1000)
    assert tried.live().canary is None and tried.releases.ledger().canary is None
    with pytest.raises(Conflict, match="no canary is running"):
        moves.end_canary(tried.releases, "end")


def test_refusing_what_is_tried_out_ends_the_canary_first(tried):
    moves.refuse(tried.releases, C, reason="half the users are gone", attempt="gate")
    assert tried.live().canary is None and tried.live().generation == B
    canary_end, refused = tried.releases.history()[-2:]
    assert (canary_end.action, canary_end.abandoned, canary_end.reason) == ("end_canary", True, refused.reason)
    assert refused.action == "refuse" and tried.releases.state(C) is GenerationState.REFUSED
    with pytest.raises(Conflict, match="refused"):
        moves.publish(tried.releases, C, attempt="canary publish")
    # A later verification of the same generation that fails also ends a later canary of it.
    tried.releases.mark_verified(C, attempt="gate")
    moves.start_canary(tried.releases, C, 5.0, "once more")
    moves.refuse(tried.releases, C, reason="still bad", attempt="gate")
    assert tried.live().canary is None and tried.releases.state(C) is GenerationState.REFUSED


def test_what_is_tried_out_is_not_retired(tried):
    tried.clock.now_s += 200_000
    assert C not in unneeded_generations(tried.releases, kept_generations=0, grace_s=0, abandon_after_s=0)
    with pytest.raises(Conflict):
        retire(tried.releases, C, attempt="sweep", abandon_after_s=0)


def test_only_one_verified_newer_generation_is_tried_out_next_to_a_live_one(world):
    world.load(A)
    with pytest.raises(Conflict, match="no generation is live"):
        moves.start_canary(world.releases, A, 5.0, "try")
    world.load(C)
    world.publish(B)
    with pytest.raises(Conflict, match="older than"):
        moves.start_canary(world.releases, A, 5.0, "try")
    for percent in (0.0, -1.0, 101.0, float("nan")):
        with pytest.raises(ConfigError, match="share"):
            moves.start_canary(world.releases, C, percent, "try")
    moves.refuse(world.releases, C, reason="bad", attempt="gate")
    with pytest.raises(Conflict, match="refused"):
        moves.start_canary(world.releases, C, 5.0, "try")


def test_a_canary_refused_between_look_and_move_is_not_tried_out(world, monkeypatch):
    world.publish(A)
    world.load(B)
    meanwhile(
        monkeypatch, Control, "move_pointer", lambda: moves.refuse(world.releases, B, reason="bad", attempt="gate")
    )
    with pytest.raises(Conflict, match="tried out: its state is now refused"):
        moves.start_canary(world.releases, B, 5.0, "try")
    assert world.live().canary is None


def test_a_canary_whose_writer_died_after_the_move_is_settled(world, monkeypatch):
    world.publish(A)
    world.load(B)

    def die(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
        with pytest.raises(KeyboardInterrupt):
            moves.start_canary(world.releases, B, 5.0, "try")
    assert world.releases.ledger().canary == world.live().canary is not None
    assert not moves.start_canary(world.releases, B, 5.0, "try").has_moved


def test_an_override_is_kept_with_its_reason_until_its_generation_is_rolled_back(world):
    world.publish(A)
    world.load(B)
    moves.refuse(world.releases, B, reason="score_psi", attempt="gate")
    world.releases.override(B, rule="score_psi", reason=" retrained ", attempt="operator")
    assert world.releases.ledger().overrides_by_generation == {B: {"score_psi": "retrained"}}
    assert world.releases.state(B) is GenerationState.REFUSED, "only another verification lifts a refusal"
    world.releases.mark_verified(B, attempt="again")
    moves.publish(world.releases, B, attempt="publish")
    assert world.releases.ledger().overrides_by_generation == {B: {"score_psi": "retrained"}}
    moved = moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    assert world.releases.ledger().overrides_by_generation == {}
    (note,) = _describe_ended_overrides(world.releases.history(), moved.pointer.epoch)
    assert note.startswith(f"the override of score_psi for {B} has ended with this roll back")


def test_a_roll_back_says_that_it_ends_the_canary(world):
    world.publish(A, B)
    world.load(C)
    moves.start_canary(world.releases, C, 5.0, "try")
    moved = moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    (note,) = _describe_ended_canary(world.releases.history(), moved.pointer.epoch)
    assert note.startswith(f"the canary {C}, which had 5 % of the requests, has ended with this roll back")
    assert _describe_ended_canary(world.releases.history(), moved.pointer.epoch + 1) == []


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_an_override_demands_a_reason(world, reason):
    world.load(A)
    with pytest.raises(ConfigError, match="reason"):
        world.releases.override(A, rule="score_psi", reason=reason, attempt="operator")


def test_what_is_published_or_unknown_cannot_be_overridden(world):
    world.publish(A, B)
    for generation in (A, B, C):
        with pytest.raises(Conflict, match="cannot override"):
            world.releases.override(generation, rule="x", reason="y", attempt="operator")


def test_a_note_that_comes_late_never_pulls_a_generation_back(world):
    world.publish(A)
    for state in (GenerationState.BEGUN, GenerationState.LOADED):
        world.releases.note(A, state)
    assert world.control.rows()[A].state is GenerationState.LIVE
    world.load(B)
    world.releases.note(B, GenerationState.LOADED)
    assert world.control.rows()[B].state is GenerationState.VERIFIED


def test_a_roll_back_that_died_before_redis_was_lost_is_carried_out_by_restore(world, monkeypatch):
    world.publish(A, B)

    def die(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
        with pytest.raises(KeyboardInterrupt):
            moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    pointer_before = world.live()
    lose_redis(world)

    pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    assert (pointer.generation, pointer.epoch > pointer_before.epoch) == (A, True)
    assert world.releases.state(B) is GenerationState.ROLLED_BACK


def test_pages_that_an_older_snapshot_brings_back_go_with_their_row(world):
    world.publish(A, B, C)
    saved = {key: world.client.dump(key) for key in world.pages() if A in key}
    world.clock.now_s += 100
    retire(world.releases, A, attempt="sweep")
    for key, value in saved.items():
        world.client.restore(key, 0, value)
    row = world.control.rows()[A]
    world.control.set_row(A, type(row)(GenerationState.SUPERSEDED, row.at))
    assert unneeded_generations(world.releases, kept_generations=0, grace_s=60) == [A]
    assert retire(world.releases, A, attempt="sweep") == len(saved) > 0
    assert not any(A in key for key in world.pages())
