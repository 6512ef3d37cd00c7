"""Rules for a reader of the pointer: only a greater epoch is followed. Pure."""

from typing import Literal

from cache.store.releases import Pointer, Release

Verdict = Literal["same", "newer", "vanished", "backwards", "conflicting"]


def judge(pointer: Pointer | None, seen: Pointer | None) -> Verdict:
    """Verdict on the pointer for a reader that has seen `seen`."""
    if pointer is None:
        return "vanished"
    if seen is None or pointer.epoch > seen.epoch:
        return "newer"
    if pointer.epoch < seen.epoch:
        return "backwards"
    return "same" if pointer.generation == seen.generation else "conflicting"


def as_pointer(release: Release) -> Pointer:
    """The pointer that a completed move wrote."""
    return Pointer(release.generation, release.epoch, release.previous, release.attempt, release.at)
