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
    own = next(
        (
            each
            for each in reversed(history)
            if each.done and (each.action, each.attempt) == (action, attempt)
            and generation in (None, each.generation) and percent in (None, each.percent)
        ),
        None,
    )  # fmt: skip
    if own is None:
        return None
    later = [each for each in history if each.epoch > own.epoch and _counts(each)]
    if (undone := _undone(own, history, later)) is None:
        return Pointer(own.generation, own.epoch, own.previous, attempt, own.at)
    if action in ("publish", "canary") and any(
        each.action == "verify" and each.generation == own.generation and each.epoch > undone.epoch
        for each in later
    ):
        return None
    what = undone.action.replace("_", " ")
    raise Conflict(
        f"this attempt did it at epoch {own.epoch}; since then {what} of {undone.generation} at epoch {undone.epoch}: "
        "use a new attempt",
        epoch=own.epoch, undone=undone.epoch,
    )  # fmt: skip


def _counts(release: Release) -> bool:
    return release.done or release.action == "verify"


def _undone(own: Release, history: Sequence[Release], later: Sequence[Release]) -> Release | None:
    """The record that took its effect away."""
    match own.action:
        case "publish":
            return _taken_back(own, history, later)
        case "roll_back":
            left = fold([each for each in history if each.epoch < own.epoch]).live
            back = (each for each in later if each.action in MOVES and each.generation == left)
            return next(back, None) or _taken_back(own, history, later)
        case "canary":
            ends = (each for each in later if each.action in MOVES or each.action == "end_canary")
            end = next(ends, None)
            return None if end is None or end.action == "publish" else end
    again = (
        each
        for each in later
        if each.action == "canary"
        or (own.abandoned and each.action == "verify" and each.generation == own.generation)
    )
    is_tried_out = fold(history).canary is not None
    return next((each for each in again if is_tried_out or each.action == "verify"), None)


def _taken_back(
    own: Release, history: Sequence[Release], later: Sequence[Release]
) -> Release | None:
    """The last roll back since that took what was made live away, or jumped over it, unless it is back."""

    def state_until(epoch: int) -> State | None:
        about = [each for each in history if each.epoch <= epoch and not _retires(each, own)]
        return fold(about).state(own.generation)

    if not later or state_until(later[-1].epoch) in _PUBLISHED:
        return None
    return next(
        (
            each
            for each in reversed(later)
            if each.action == "roll_back" and state_until(each.epoch - 1) in _PUBLISHED
            and state_until(each.epoch) is State.ROLLED_BACK
        ),
        None,
    )  # fmt: skip


def _retires(release: Release, own: Release) -> bool:
    return release.action == "retire" and release.generation == own.generation


def new_attempt() -> str:
    """Names an attempt made from a shell."""
    return f"shell-{uuid.uuid4().hex[:12]}"
