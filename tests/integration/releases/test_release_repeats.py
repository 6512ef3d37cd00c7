"""Repeats of an attempt whose effect no longer stands, and generations that nobody compared with what is live."""

from dataclasses import replace

import pytest

from cache.control.states import GenerationState
from cache.errors import Conflict
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path
from precompute.releases import moves
from precompute.releases.replication import VerifyReport
from precompute.releases.sweep import retire, unneeded_generations
from tests.integration.release_world import A, B, C, D, World


@pytest.fixture
def world(tmp_path, redis_url, keyspace):
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def test_a_retry_after_a_newer_publish_has_succeeded_and_publishes_nothing(world):
    world.publish(A)
    world.load(B)
    moves.publish(world.releases, B, attempt="run-b")
    world.publish(C)
    assert not moves.publish(world.releases, B, attempt="run-b").has_moved
    world.publish(D)
    retire(world.releases, B, attempt="sweep")
    assert not moves.publish(world.releases, B, attempt="run-b").has_moved
    assert world.live().generation == D


def test_a_repeated_publish_says_that_it_was_rolled_back_even_once_it_is_retired(world):
    world.publish(A)
    world.load(B)
    moves.publish(world.releases, B, attempt="run-b")
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    for _ in range(2):
        with pytest.raises(Conflict, match=r"roll back of .* use a new attempt"):
            moves.publish(world.releases, B, attempt="run-b")
        retire(world.releases, B, attempt="sweep")


def test_a_repeated_publish_says_that_a_roll_back_jumped_over_it(world):
    world.publish(A)
    world.load(B)
    moves.publish(world.releases, B, attempt="run-b")
    world.publish(C)
    moves.roll_back(world.releases, target_generation=A, reason="bad", attempt="operator")
    with pytest.raises(Conflict, match=r"roll back of .* use a new attempt"):
        moves.publish(world.releases, B, attempt="run-b")


def test_a_repeated_roll_back_says_that_what_it_left_is_back(world):
    world.publish(A, B)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="on call")
    assert not moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="on call").has_moved
    world.releases.mark_verified(B, attempt="again")
    moves.publish(world.releases, B, attempt="again")
    with pytest.raises(Conflict, match=r"publish of .* use a new attempt"):
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="on call")
    assert world.live().generation == B


def test_a_repeated_roll_back_stands_after_a_newer_publish(world):
    world.publish(A, B)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="on call")
    world.publish(C)
    assert not moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="on call").has_moved
    assert world.live().generation == C


def test_a_canary_start_stands_once_it_was_published_but_not_once_rolled_back(world):
    world.publish(A)
    for generation in (B, C):
        world.load(generation)
    moves.start_canary(world.releases, B, 5.0, "try b")
    moves.publish(world.releases, B, attempt="run-b")
    assert not moves.start_canary(world.releases, B, 5.0, "try b").has_moved
    moves.start_canary(world.releases, C, 5.0, "try c")
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    with pytest.raises(Conflict, match="use a new attempt"):
        moves.start_canary(world.releases, C, 5.0, "try c")


def test_a_cleared_run_tries_out_again_what_was_verified_again(world):
    world.publish(A)
    world.load(B)
    moves.start_canary(world.releases, B, 5.0, "run")
    moves.end_canary(world.releases, "operator", "bad", is_abandoned=True)
    world.releases.mark_verified(B, attempt="run")
    assert moves.start_canary(world.releases, B, 5.0, "run").has_moved
    assert world.live().canary.generation == B
    with pytest.raises(Conflict, match="use a new attempt"):
        moves.end_canary(world.releases, "operator", "bad", is_abandoned=True)
    assert world.live().canary.generation == B


def test_a_roll_back_that_jumps_takes_back_all_that_came_after_its_target(world):
    world.publish(A, B, C)
    moves.roll_back(world.releases, target_generation=A, reason="bad", attempt="operator")
    assert world.live().previous is None and world.releases.ledger().previous_generation is None
    for generation in (B, C):
        assert world.control.rows()[generation].state is GenerationState.ROLLED_BACK
        assert world.releases.state(generation) is GenerationState.ROLLED_BACK
        with pytest.raises(Conflict, match="rolled_back"):
            moves.roll_back(world.releases, target_generation=generation, reason="worse", attempt="operator-2")
    world.releases.mark_verified(B, attempt="again")
    moves.publish(world.releases, B, attempt="again")
    assert (world.live().generation, world.live().previous) == (B, A)


def test_what_a_roll_back_jumps_over_stays_retired_if_it_is_being_retired(world, monkeypatch):
    world.publish(A, B, C, D)
    world.clock.now_s += 1_000
    real = world.control.move_pointer

    def move(*arguments, **options):
        retire(world.releases, B, attempt="sweep")
        return real(*arguments, **options)

    monkeypatch.setattr(world.control, "move_pointer", move)
    moves.roll_back(world.releases, target_generation=A, reason="bad", attempt="operator")
    assert world.control.rows()[B].state is GenerationState.RETIRED
    assert world.releases.state(B) is GenerationState.RETIRED


def test_the_order_of_releases_is_theirs_whatever_the_clock_says(world):
    world.clock.now_s += 3_600
    world.publish(A, B)
    world.clock.now_s -= 100_000_000
    world.publish(C)
    world.clock.now_s -= 86_400
    world.publish(D)
    assert (world.live().previous, world.releases.ledger().previous_generation) == (C, C)
    world.clock.now_s += 1_000
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [A, B]


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(world):
    world.clock.now_s += 300_000_000
    world.publish(A, B, C)
    world.clock.now_s -= 300_000_000
    world.publish(D)
    assert A not in unneeded_generations(world.releases, kept_generations=0, grace_s=60), "it was left just now"
    world.clock.now_s += 61
    assert unneeded_generations(world.releases, kept_generations=0, grace_s=60) == [A, B]
    retire(world.releases, A, attempt="sweep", grace_s=60)


def gates(world, generation, *verdicts):
    manifest = replace(world.make(generation), gates=verdicts)
    world.store.write(generation_path(generation, "manifest.json"), manifest.to_bytes())


@pytest.mark.parametrize("verdicts", [(), ({"rule": "skew", "passed": False},)])
def test_nothing_whose_gates_failed_or_never_ran_is_published_or_tried_out(world, verdicts):
    world.publish(A)
    world.load(B)
    gates(world, B, *verdicts)
    for move in (
        lambda: moves.publish(world.releases, B, attempt="x"),
        lambda: moves.start_canary(world.releases, B, 5.0, "y"),
    ):
        with pytest.raises(Conflict, match="failed skew" if verdicts else "no gate"):
            move()
    assert world.live().generation == A and world.live().canary is None


def test_what_was_compared_with_another_generation_is_neither_published_nor_tried_out(world):
    world.publish(A)
    for generation in (B, C):
        world.load(generation)
    verified: VerifyReport = {"baseline": A}
    others: tuple[VerifyReport, ...] = ({"baseline": None}, {})
    moves.publish(world.releases, B, attempt="run-b", verified=verified)
    for report in (verified, *others):
        with pytest.raises(Conflict, match=r"run `verify .*` again"):
            moves.publish(world.releases, C, attempt="run-c", verified=report)
        with pytest.raises(Conflict, match=r"run `verify .*` again"):
            moves.start_canary(world.releases, C, 5.0, "try", verified=report)
    # A repeated attempt finds its own work, whatever is live by now.
    assert not moves.publish(world.releases, B, attempt="run-b", verified=verified).has_moved
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    with pytest.raises(Conflict, match="verified against"):
        moves.publish(world.releases, C, attempt="run-c", verified={"baseline": B})
    assert moves.publish(world.releases, C, attempt="run-c", verified=verified).has_moved
