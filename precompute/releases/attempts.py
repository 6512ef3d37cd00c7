"""Repeats: what an attempt of this name did earlier, and whether that still stands."""

import uuid
from collections.abc import Sequence
from typing import Literal

from cache.errors import Conflict
from cache.store.releases import MOVES, Pointer, Release
from precompute.control.states import State, fold

Repeatable = Literal["publish", "roll_back", "canary", "end_canary"]

_PUBLISHED = (State.LIVE, State.SUPERSEDED)


def earlier(
    history: Sequence[Release],
    action: Repeatable,
    attempt: str,
    generation: str | None,
    percent: float | None = None,
) -> Pointer | None:
    """The pointer that this very attempt made, None when it has yet to act. `history`: settled, oldest first.

    What a later publish superseded was done all the same. Raises Conflict when it was undone since. A verification
    after that asks for a new publish or canary: an operator who clears a whole run keeps its name.
    """
    own_release = next(
        (
            release
            for release in reversed(history)
            if release.is_done and (release.action, release.attempt) == (action, attempt)
            and generation in (None, release.generation) and percent in (None, release.percent)
        ),
        None,
    )  # fmt: skip
    if own_release is None:
        return None
    later = [
        release for release in history if release.epoch > own_release.epoch and _counts(release)
    ]
    if (undone := _undone(own_release, history, later)) is None:
        return Pointer(
            own_release.generation, own_release.epoch, own_release.previous, attempt, own_release.at
        )
    if action in ("publish", "canary") and any(
        release.action == "verify"
        and release.generation == own_release.generation
        and release.epoch > undone.epoch
        for release in later
    ):
        return None
    action_text = undone.action.replace("_", " ")
    raise Conflict(
        f"this attempt did it at epoch {own_release.epoch}; since then {action_text} of {undone.generation} at epoch "
        f"{undone.epoch}: "
        "use a new attempt",
        epoch=own_release.epoch, undone=undone.epoch,
    )  # fmt: skip


def _counts(release: Release) -> bool:
    return release.is_done or release.action == "verify"


def _undone(
    own_release: Release, history: Sequence[Release], later: Sequence[Release]
) -> Release | None:
    """The record that took its effect away."""
    match own_release.action:
        case "publish":
            return _taken_back(own_release, history, later)
        case "roll_back":
            former_live_id = fold(
                [release for release in history if release.epoch < own_release.epoch]
            ).live
            back = (
                release
                for release in later
                if release.action in MOVES and release.generation == former_live_id
            )
            return next(back, None) or _taken_back(own_release, history, later)
        case "canary":
            ends = (
                release
                for release in later
                if release.action in MOVES or release.action == "end_canary"
            )
            end = next(ends, None)
            return None if end is None or end.action == "publish" else end
    repeat_releases = (
        release
        for release in later
        if release.action == "canary"
        or (
            own_release.abandoned
            and release.action == "verify"
            and release.generation == own_release.generation
        )
    )
    is_tried_out = fold(history).canary is not None
    return next(
        (release for release in repeat_releases if is_tried_out or release.action == "verify"), None
    )


def _taken_back(
    own_release: Release, history: Sequence[Release], later: Sequence[Release]
) -> Release | None:
    """The last roll back since that took what was made live away, or jumped over it, unless it is back."""

    def state_until(epoch: int) -> State | None:
        about = [
            release
            for release in history
            if release.epoch <= epoch and not _retires(release, own_release)
        ]
        return fold(about).state(own_release.generation)

    if not later or state_until(later[-1].epoch) in _PUBLISHED:
        return None
    return next(
        (
            release
            for release in reversed(later)
            if release.action == "roll_back" and state_until(release.epoch - 1) in _PUBLISHED
            and state_until(release.epoch) is State.ROLLED_BACK
        ),
        None,
    )  # fmt: skip


def _retires(release: Release, own_release: Release) -> bool:
    return release.action == "retire" and release.generation == own_release.generation


def new_attempt() -> str:
    """Names an attempt made from a shell."""
    return f"shell-{uuid.uuid4().hex[:12]}"
