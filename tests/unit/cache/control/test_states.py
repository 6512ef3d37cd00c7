"""The state machine: single rules, then random histories."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.control.states import (
    STATE_OF_REPLACED,
    STATES_BY_ACTION,
    TRANSITIONS,
    GenerationState,
    demand_allowed,
    fold_releases,
)
from cache.errors import Conflict
from cache.store.releases import MOVE_ACTIONS, Action, Canary, Release


def release(epoch, action, generation, *, is_done=True, expires_at=None):
    return Release(epoch, action, generation, None, f"a{epoch}", float(epoch), is_done=is_done, expires_at=expires_at)


def test_a_roll_back_recorded_once_more_jumps_over_nothing_else():
    releases = [release(1, "publish", "a"), release(2, "publish", "b"), release(3, "publish", "c")]
    releases += [release(4, "roll_back", "b"), release(5, "roll_back", "b")]
    ledger = fold_releases(releases)
    assert (ledger.live_generation, ledger.previous_generation, ledger.state("c")) == (
        "b",
        "a",
        GenerationState.ROLLED_BACK,
    )


def test_publishing_supersedes_and_rolling_back_returns():
    ledger = fold_releases([release(1, "publish", "a"), release(2, "publish", "b"), release(3, "roll_back", "a")])
    assert ledger.live_generation == "a" and ledger.state("b") is GenerationState.ROLLED_BACK
    assert ledger.previous_generation is None


def test_previous_is_never_the_generation_rolled_back():
    """Of a, b, c published, c rolled back to b: previous is a."""
    history = [release(1, "publish", "a"), release(2, "publish", "b"), release(3, "publish", "c")]
    ledger = fold_releases([*history, release(4, "roll_back", "b")])
    assert (ledger.live_generation, ledger.previous_generation, ledger.state("c")) == (
        "b",
        "a",
        GenerationState.ROLLED_BACK,
    )


def test_a_roll_back_takes_back_all_that_was_live_after_its_target():
    """a, b, c published, rolled back to a: b is newer than a, so going back again must not land there."""
    history = [release(1, "publish", "a"), release(2, "publish", "b"), release(3, "publish", "c")]
    ledger = fold_releases([*history, release(4, "roll_back", "a")])
    assert (ledger.live_generation, ledger.previous_generation) == ("a", None)
    assert ledger.state("b") is ledger.state("c") is GenerationState.ROLLED_BACK
    republished_history = [
        *history,
        release(4, "roll_back", "a"),
        release(5, "verify", "b"),
        release(6, "publish", "b"),
    ]
    assert (
        fold_releases(republished_history).live_generation,
        fold_releases(republished_history).previous_generation,
    ) == ("b", "a")
    # The generation before the target stays the one to roll back to.
    assert (
        fold_releases([*history, release(4, "publish", "d"), release(5, "roll_back", "c")]).previous_generation == "b"
    )


def test_previous_follows_the_order_of_releases_and_no_clock():
    late = replace(release(1, "publish", "a"), at=9e9), replace(release(2, "publish", "b"), at=9e9)
    ledger = fold_releases([*late, release(3, "publish", "c"), release(4, "publish", "d")])
    assert ledger.previous_generation == "c"


def test_an_intent_that_was_never_completed_moves_nothing():
    ledger = fold_releases([release(1, "publish", "a"), release(2, "publish", "b", is_done=False)])
    assert ledger.live_generation == "a" and ledger.epoch == 2 and ledger.state("b") is None


def test_a_rolled_back_generation_needs_a_verification_before_it_is_published():
    with pytest.raises(Conflict):
        demand_allowed("publish", "b", GenerationState.ROLLED_BACK)
    demand_allowed("verify", "b", GenerationState.ROLLED_BACK)
    demand_allowed("publish", "b", GenerationState.VERIFIED)


@pytest.mark.parametrize("state", [state for state in GenerationState if state is not GenerationState.SUPERSEDED])
def test_a_rollback_lands_on_superseded_generations_only(state):
    with pytest.raises(Conflict):
        demand_allowed("roll_back", "x", state)


@pytest.mark.parametrize(
    "state", [GenerationState.LIVE, GenerationState.VERIFIED, GenerationState.LOADED, GenerationState.BEGUN]
)
def test_what_is_live_or_on_its_way_is_never_retired(state):
    with pytest.raises(Conflict):
        demand_allowed("retire", "x", state)


def test_a_pin_ends_when_it_expires_or_is_lifted():
    pinned = fold_releases([release(1, "pin", "a", expires_at=10.0)])
    assert pinned.is_pinned("a", 9.0) and not pinned.is_pinned("a", 10.0)
    assert not fold_releases([release(1, "pin", "a"), release(2, "unpin", "a")]).is_pinned("a", 0.0)


@pytest.mark.parametrize("action", ["refuse", "verify", "abandon", "retire"])
def test_no_judgement_that_comes_late_changes_what_is_live(action):
    ledger = fold_releases([release(1, "publish", "a"), release(2, action, "a")])
    assert ledger.live_generation == "a" and ledger.state("a") is GenerationState.LIVE


@pytest.mark.parametrize("action", ["refuse", "verify", "abandon"])
def test_what_was_retired_stays_retired(action):
    history = [release(1, "publish", "a"), release(2, "publish", "b"), release(3, "retire", "a")]
    assert fold_releases([*history, release(4, action, "a")]).state("a") is GenerationState.RETIRED


def test_a_retirement_of_what_no_other_record_mentions_is_final():
    """A refusal marks its row first; a sweep may retire it before the refusal itself is written down."""
    history = [release(1, "retire", "a"), release(2, "refuse", "a")]
    assert fold_releases(history).state("a") is GenerationState.RETIRED


def test_a_canary_moves_the_pointer_and_makes_nothing_live():
    history = [release(1, "publish", "a"), replace(release(2, "canary", "b"), percent=5.0)]
    ledger = fold_releases(history)
    assert (ledger.live_generation, ledger.live_epoch, ledger.canary) == ("a", 2, Canary("b", 5.0, 2.0))
    undone = fold_releases([history[0], replace(history[1], is_done=False)])
    assert (undone.live_epoch, undone.epoch, undone.canary) == (1, 2, None)
    abandoned_ledger = fold_releases([*history, replace(release(3, "end_canary", "b"), abandoned=True)])
    assert (abandoned_ledger.live_epoch, abandoned_ledger.canary) == (3, None) and abandoned_ledger.state(
        "b"
    ) is GenerationState.ABANDONED
    assert fold_releases([*history, release(3, "publish", "b")]).canary is None


def test_every_action_of_a_record_is_in_the_table():
    assert set(TRANSITIONS) | {"pin", "unpin"} == set(get_args(Action)) | {"begin", "load"}
    assert set(STATE_OF_REPLACED) == MOVE_ACTIONS


@pytest.mark.parametrize("state", [GenerationState.REFUSED, GenerationState.ROLLED_BACK, GenerationState.ABANDONED])
def test_what_was_rejected_stays_so_however_often_it_is_made_until_it_is_verified(state):
    for action in ("begin", "load", "override"):
        assert TRANSITIONS[action].get(state) in (state, None)
    assert TRANSITIONS["verify"][state] is GenerationState.VERIFIED
    assert GenerationState.LIVE not in {table.get(state) for table in TRANSITIONS.values()}


def test_verifying_a_superseded_generation_again_keeps_it_a_target_of_rollbacks():
    history = [release(1, "publish", "a"), release(2, "publish", "b"), release(3, "verify", "a")]
    assert fold_releases(history).previous_generation == "a"


def test_a_generation_that_no_row_knows_can_be_abandoned():
    demand_allowed("abandon", "a", None)
    with pytest.raises(Conflict):
        demand_allowed("abandon", "a", GenerationState.LIVE)


actions = st.lists(
    st.tuples(
        st.sampled_from(["publish", "roll_back", "refuse", "verify", "retire", "restore", "pin"]),
        st.sampled_from("abcdef"),
        st.booleans(),
    ),
    max_size=30,
)


@settings(max_examples=500)
@given(actions)
def test_whatever_is_allowed_keeps_one_live_and_a_previous_that_was_never_bad(steps):
    """Random operations, each taken only if the state machine allows it from the ledger's own state."""
    history: list[Release] = []
    states: dict[str, GenerationState] = {}
    for epoch, (action, generation, is_done) in enumerate(steps, 1):
        ledger = fold_releases(history)
        state = ledger.state(generation) or states.get(generation, GenerationState.LOADED)
        if action == "restore":
            if ledger.live_generation is None:
                continue
            generation = ledger.live_generation
        elif action != "pin" and state not in STATES_BY_ACTION[action]:
            continue
        history.append(release(epoch, action, generation, is_done=is_done))
        if action == "verify":
            states[generation] = GenerationState.VERIFIED
    ledger = fold_releases(history)
    live = [
        generation_id
        for generation_id, state in (ledger.state_by_generation or {}).items()
        if state is GenerationState.LIVE
    ]
    assert live == ([ledger.live_generation] if ledger.live_generation else [])
    if ledger.previous_generation is not None:
        assert (
            ledger.state(ledger.previous_generation) is GenerationState.SUPERSEDED
            and ledger.previous_generation != ledger.live_generation
        )
    completed = [
        release_record
        for release_record in history
        if release_record.action in ("publish", "roll_back") and release_record.is_done
    ]
    for preceding_release, after in itertools.pairwise(completed):
        rejected_generations = {
            release_record.generation
            for release_record in history
            if preceding_release.epoch < release_record.epoch < after.epoch
            and release_record.action in ("refuse", "retire")
        }
        assert after.action != "roll_back" or after.generation not in rejected_generations
