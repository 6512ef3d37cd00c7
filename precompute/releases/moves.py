"""Moves of the pointer: publish, roll back and canaries, each checked and made by compare-and-set."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from cache.control.control_keys import MOVE_FORMATS, RegistryRow, demand_readers
from cache.control.states import STATES_BY_ACTION, GenerationState, demand_allowed, fold_releases
from cache.errors import ConfigError, Conflict, UnknownGeneration
from cache.format.manifest import CUT_CHARS
from cache.formats import FORMATS, MANIFEST, THIS_RELEASE
from cache.store.artefacts import read_manifest
from cache.store.releases import MOVE_ACTIONS, Action, Canary, Pointer, Release, demand_released_manifest
from precompute.bulk.governor import Governor
from precompute.bulk.load import unlink_pages
from precompute.bulk.reload import load_missing, repair_pages
from precompute.releases.release_log import (
    LOOK_TRIES,
    Releases,
    ReleaseView,
    generation_state,
    ledger_and_rows_after_move,
)
from precompute.releases.replication import VerifyReport

RepeatableAction = Literal["publish", "roll_back", "canary", "end_canary"]

_PUBLISHED_STATES = (GenerationState.LIVE, GenerationState.SUPERSEDED)


@dataclass(frozen=True, slots=True)
class MoveResult:
    """Result of a move of the pointer; `has_moved` is False if this or another attempt had already made the move."""

    pointer: Pointer
    has_moved: bool


def publish(
    releases: Releases,
    generation: str,
    *,
    attempt: str,
    verified: VerifyReport | None = None,
    governor: Governor | None = None,
) -> MoveResult:
    """Make a verified generation live; a repeat of the same publish changes nothing.

    On `verified`, see `prepare_publish`.
    """
    result = prepare_publish(releases, generation, attempt=attempt, verified=verified, governor=governor)
    if result is not None:
        return result
    view = releases.view()
    if (live := _demand_publish(releases, generation, view, verified)) is not None:
        return MoveResult(live, has_moved=False)
    try:
        return _move_live(releases, "publish", generation, view, attempt=attempt, governor=governor)
    except Conflict:
        # Another night of the same inputs may have published the same generation meanwhile.
        pointer = releases.control.read_pointer()
        if pointer is None or pointer.generation != generation:
            raise
        return MoveResult(pointer, has_moved=False)


def prepare_publish(
    releases: Releases,
    generation: str,
    *,
    attempt: str,
    verified: VerifyReport | None = None,
    governor: Governor | None = None,
) -> MoveResult | None:
    """Stream the missing pages of a generation to be published; return the result if it was published already.

    With the report of `verify` (`verified`), raises Conflict if it names another live generation than the current one.
    """
    view = releases.view()
    if (earlier_pointer := pointer_of_attempt(view.history, "publish", attempt, generation)) is not None:
        return MoveResult(earlier_pointer, has_moved=False)
    if (live := _demand_publish(releases, generation, view, verified)) is not None:
        return MoveResult(live, has_moved=False)
    with conflict_if_files_missing(generation):
        load_missing(releases.control, releases.store, generation, governor=governor)
    return None


def _demand_publish(
    releases: Releases, generation: str, view: ReleaseView, verified: VerifyReport | None
) -> Pointer | None:
    if view.pointer is not None and view.pointer.generation == generation:
        return view.pointer
    view.demand_agreement()
    demand_allowed("publish", generation, view.state(generation))
    _demand_newer(generation, view.ledger.live_generation)
    _demand_gates(releases, generation, view.ledger.live_generation, verified)
    _demand_readers(releases, generation)
    # The registry must know the generation before its pages are in Redis.
    _write_missing_row(releases, generation, view)
    return None


def roll_back(releases: Releases, *, target_generation: str | None, reason: str, attempt: str) -> MoveResult:
    """Make an earlier generation live again; the one rolled back needs another verification before it can return.

    Before the move, only the target's registry row and a sample of its pages' lengths are checked, so readers follow
    within a second whatever its size; call `repair_live` afterwards.
    """
    view = releases.view()
    if (earlier_pointer := pointer_of_attempt(view.history, "roll_back", attempt, target_generation)) is not None:
        return MoveResult(earlier_pointer, has_moved=False)
    target = target_generation or view.ledger.previous_generation
    if target is None:
        raise Conflict("there is no earlier generation to roll back to")
    if (live := _demand_roll_back(releases, target, view)) is not None:
        return MoveResult(live, has_moved=False)
    rolled_back_id = view.ledger.live_generation
    with conflict_if_files_missing(target):
        demand_released_manifest(releases.store, target, view.history)
        load_missing(releases.control, releases.store, target, is_urgent=True)
    view = releases.view()
    if view.ledger.live_generation != rolled_back_id:
        raise Conflict(
            f"{view.ledger.live_generation} became live while {target} was being checked: to roll that back as "
            "well, repeat the roll back"
        )
    if (live := _demand_roll_back(releases, target, view)) is not None:
        return MoveResult(live, has_moved=False)
    return _move_live(releases, "roll_back", target, view, attempt=attempt, reason=reason)


def repair_live(releases: Releases, generation: str, *, governor: Governor | None = None) -> list[str]:
    """Read the pages of the live generation back and repair damaged ones; return their keys.

    Does nothing if the generation is no longer live.
    """
    if (pointer := releases.control.read_pointer()) is None or pointer.generation != generation:
        return []
    return repair_pages(releases.control, releases.store, generation, governor=governor)


def _demand_roll_back(releases: Releases, target_generation: str, view: ReleaseView) -> Pointer | None:
    if view.pointer is not None and view.pointer.generation == target_generation:
        return view.pointer
    view.demand_agreement()
    demand_allowed("roll_back", target_generation, view.ledger.state(target_generation))
    _demand_readers(releases, target_generation)
    _write_missing_row(releases, target_generation, view)
    return None


def _move_live(
    releases: Releases,
    action: Action,
    generation: str,
    view: ReleaseView,
    *,
    attempt: str,
    reason: str = "",
    governor: Governor | None = None,
) -> MoveResult:
    with conflict_if_files_missing(generation):
        manifest = read_manifest(releases.store, generation)
    ledger_after, rows = ledger_and_rows_after_move(
        view, action, generation, attempt=attempt, moved_at=releases.clock(), reason=reason
    )
    previous, published_at = ledger_after.previous_generation, releases.clock()
    release = releases.record(
        action, generation, attempt=attempt, reason=reason, previous_generation=previous, expected_epoch=view.epoch
    )
    new_pointer = Pointer(generation, release.epoch, previous, attempt, published_at=published_at)
    try:
        return _commit(releases, new_pointer, view, rows, action)
    except Conflict as error:
        if error.details.get("state") == GenerationState.RETIRED:
            # Pages loaded for this move while a retirement was removing them would otherwise stay in Redis.
            unlink_pages(releases.control.client, releases.control.keyspace, manifest, governor=governor)
        raise


def start_canary(
    releases: Releases,
    generation: str,
    canary_percent: float,
    attempt: str,
    *,
    verified: VerifyReport | None = None,
    feedback_event: str = "",
    governor: Governor | None = None,
) -> MoveResult:
    """Let a verified generation answer `canary_percent` of the requests beside the live one, or change that percentage.

    On `verified`, see `prepare_publish`.

    Raises Conflict if nothing is live, another canary runs, or the generation could not be published.
    """
    if not 0 < canary_percent <= 100:
        raise ConfigError(f"a canary's share must be above 0 and at most 100 %, not {canary_percent}")
    view = releases.view()
    if pointer_of_attempt(view.history, "canary", attempt, generation, canary_percent) is not None:
        return MoveResult(_followed_pointer(view), has_moved=False)
    live = _demand_canary(releases, generation, view, verified)
    if view.ledger.canary is not None and view.ledger.canary.percent == canary_percent:
        return MoveResult(live, has_moved=False)
    with conflict_if_files_missing(generation):
        load_missing(releases.control, releases.store, generation, governor=governor)
    view = releases.view()
    live = _demand_canary(releases, generation, view, verified)
    release = releases.record(
        "canary",
        generation,
        attempt=attempt,
        previous_generation=live.previous,
        canary_percent=canary_percent,
        rule=feedback_event,
        expected_epoch=view.epoch,
    )
    new_pointer = replace(
        live, epoch=release.epoch, attempt=attempt,
        canary=Canary(generation, canary_percent, release.at, feedback_event),
    )  # fmt: skip
    return _commit(releases, new_pointer, view, {}, "canary", is_live_move=False)


def _demand_canary(releases: Releases, generation: str, view: ReleaseView, verified: VerifyReport | None) -> Pointer:
    view.demand_agreement()
    running_canary = view.ledger.canary
    if running_canary is not None and running_canary.generation != generation:
        raise Conflict(
            f"{running_canary.generation} is running as a canary: end that canary first",
            generation=running_canary.generation,
        )
    if view.pointer is None:
        raise Conflict("no generation is live to compare a canary with: publish this one")
    demand_allowed("canary", generation, view.state(generation))
    _demand_newer(generation, view.ledger.live_generation)
    _demand_gates(releases, generation, view.ledger.live_generation, verified)
    _demand_readers(releases, generation)
    _write_missing_row(releases, generation, view)
    return view.pointer


def end_canary(releases: Releases, attempt: str, reason: str = "", is_abandoned: bool = False) -> MoveResult:
    """Let the live generation answer every request again; an abandoned canary needs another verification."""
    view = releases.view()
    running_canary = view.ledger.canary
    if pointer_of_attempt(view.history, "end_canary", attempt, None) is not None:
        return MoveResult(_followed_pointer(view), has_moved=False)
    if running_canary is None:
        raise Conflict("no canary is running")
    return _end_canary(releases, running_canary, view, attempt=attempt, reason=reason, is_abandoned=is_abandoned)


def _end_canary(
    releases: Releases, running_canary: Canary, view: ReleaseView, *, attempt: str, reason: str, is_abandoned: bool
) -> MoveResult:
    view.demand_agreement()
    live, generation = _followed_pointer(view), running_canary.generation
    release = releases.record(
        "end_canary",
        generation,
        attempt=attempt,
        reason=reason,
        previous_generation=live.previous,
        is_abandoned=is_abandoned,
        expected_epoch=view.epoch,
    )
    rows = {generation: RegistryRow(GenerationState.ABANDONED, release.at, reason)} if is_abandoned else {}
    new_pointer = replace(live, epoch=release.epoch, attempt=attempt, canary=None)
    return _commit(releases, new_pointer, view, rows, "end_canary", is_live_move=False)


def refuse(releases: Releases, generation: str, *, reason: str, attempt: str) -> None:
    """Refuse a generation; if it runs as a canary, end the canary first, so that it answers no more requests."""
    for _ in range(LOOK_TRIES):
        view = releases.view()
        running_canary = view.ledger.canary
        try:
            if running_canary is not None and running_canary.generation == generation:
                _end_canary(releases, running_canary, view, attempt=attempt, reason=reason, is_abandoned=True)
            return releases.record_refusal(generation, reason=reason, attempt=attempt)
        except Conflict:
            canary = releases.view().ledger.canary
            if canary is None or canary.generation != generation:
                raise  # the conflict has another cause than a canary
    raise Conflict(f"{generation} became a canary again at each attempt to refuse it; try again")


def _demand_gates(
    releases: Releases, generation: str, live_generation: str | None, verified: VerifyReport | None
) -> None:
    """Raise Conflict unless all gates passed, and the report of `verify`, if given, names the live generation."""
    with conflict_if_files_missing(generation):
        gates = read_manifest(releases.store, generation).gates
    failed_rules = [str(gate["rule"]) for gate in gates if not gate["passed"]]
    if failed_rules or not gates:
        failure_text = f"failed {', '.join(failed_rules)}" if failed_rules else "was judged by no gate"
        raise Conflict(f"{generation} {failure_text}: run `verify {generation}` first", generation=generation)
    if verified is not None and (baseline := verified.get("baseline")) != live_generation:
        raise Conflict(
            f"{generation} was verified against {baseline or 'nothing'}, live is {live_generation or 'nothing'}: "
            f"run `verify {generation}` again",
            generation=generation, baseline=baseline, live=live_generation,
        )  # fmt: skip


def _demand_readers(releases: Releases, generation: str) -> None:
    """Raise Refused unless every live replica can read the generation and the pointer that this release writes."""
    with conflict_if_files_missing(generation):
        manifest_format = read_manifest(releases.store, generation).format
    demand_readers(releases.control, {MANIFEST: manifest_format}, f"{generation} has")
    written_formats = {name: FORMATS[name].written_version for name in MOVE_FORMATS}
    demand_readers(releases.control, written_formats, f"this release ({THIS_RELEASE}) writes")


def _demand_newer(generation: str, live_generation: str | None) -> None:
    if live_generation is not None and generation[:CUT_CHARS] < live_generation[:CUT_CHARS]:
        raise Conflict(
            f"{generation} is older than {live_generation}, which is live; going back is a roll back, not a publish",
            generation=generation,
            live=live_generation,
        )


def _write_missing_row(releases: Releases, generation: str, view: ReleaseView) -> None:
    state = view.ledger.state(generation)
    if generation not in view.registry_rows and state is not None:
        rows = {generation: RegistryRow(state, releases.clock(), "restored")}
        releases.control.write_rows(rows, expected_epoch=view.epoch)


def _commit(
    releases: Releases,
    new_pointer: Pointer,
    view: ReleaseView,
    rows: Mapping[str, RegistryRow],
    action: Action,
    *,
    is_live_move: bool = True,
) -> MoveResult:
    """Move the pointer to that of a recorded intent by compare-and-set, then record that the move is done."""
    allowed_states = STATES_BY_ACTION[action] if is_live_move else (GenerationState.LIVE,)
    # Much time may have passed since the intent, so rows get the time of the move.
    rows = {generation_id: replace(row, at=releases.clock()) for generation_id, row in rows.items()}
    _demand_unmoved(releases, new_pointer, view, action)
    moved_pointer = releases.control.move_pointer(
        new_pointer, expected_epoch=view.epoch, row_by_generation=rows, allowed_states=allowed_states
    )
    if moved_pointer is None:
        raise Conflict(
            f"another publisher moved the pointer before {new_pointer.generation} could be made live; try again"
            if is_live_move
            else "another publisher moved the pointer meanwhile; try again"
        )
    releases.complete(moved_pointer.epoch)
    return MoveResult(moved_pointer, has_moved=True)


def _demand_unmoved(releases: Releases, new_pointer: Pointer, view: ReleaseView, action: Action) -> None:
    """Raise Conflict if another move was made since the view: a Redis that lost its newest rows would not notice."""
    history = releases.history()
    ledger = fold_releases(history)
    if ledger.live_epoch != view.ledger.live_epoch:
        live_release = next(release for release in history if release.epoch == ledger.live_epoch)
        if live_release.attempt == new_pointer.attempt:
            return  # a repeat of this move, which `move_pointer` recognises
        raise Conflict("another publisher moved the pointer meanwhile; try again")
    if (
        action in MOVE_ACTIONS
        and new_pointer.previous
        and ledger.state(new_pointer.previous) is GenerationState.RETIRED
    ):
        raise Conflict(f"{new_pointer.previous} was retired meanwhile; try again")
    if action != "end_canary":
        demanded_generation = (
            new_pointer.canary.generation if new_pointer.canary is not None else new_pointer.generation
        )
        demand_allowed(
            action,
            demanded_generation,
            generation_state(demanded_generation, ledger, view.registry_rows.get(demanded_generation)),
        )


@contextmanager
def conflict_if_files_missing(generation: str) -> Iterator[None]:
    """Turn missing files of a generation into a Conflict that names the generation."""
    try:
        yield
    except UnknownGeneration as error:
        raise Conflict(
            f"the files of {generation} are gone, so it cannot be made live: {error.message}", generation=generation
        ) from error


def _followed_pointer(view: ReleaseView) -> Pointer:
    if view.pointer is None:
        raise Conflict("Redis has lost its pointer: run `larder restore` first")
    return view.pointer


def new_attempt() -> str:
    """Return a unique name for an attempt made from a shell."""
    return f"shell-{uuid.uuid4().hex[:12]}"


def pointer_of_attempt(
    history: Sequence[Release],
    action: RepeatableAction,
    attempt: str,
    generation: str | None,
    canary_percent: float | None = None,
) -> Pointer | None:
    """Return the pointer that this attempt wrote, None if it has not acted yet. `history`: settled, oldest first.

    A move that a later publish superseded still counts. Raises Conflict if the move was undone since; but if the
    generation was verified after that, a publish or canary returns None, since an operator who clears a whole run
    repeats it under the same attempt.
    """
    attempt_release = next(
        (
            release
            for release in reversed(history)
            if release.is_done and (release.action, release.attempt) == (action, attempt)
            and generation in (None, release.generation) and canary_percent in (None, release.percent)
        ),
        None,
    )  # fmt: skip
    if attempt_release is None:
        return None
    later_releases = [
        release for release in history if release.epoch > attempt_release.epoch and _is_done_or_verification(release)
    ]
    if (undoing_release := _undoing_release(attempt_release, history, later_releases)) is None:
        return Pointer(
            attempt_release.generation, attempt_release.epoch, attempt_release.previous, attempt, attempt_release.at
        )
    if action in ("publish", "canary") and any(
        release.action == "verify"
        and release.generation == attempt_release.generation
        and release.epoch > undoing_release.epoch
        for release in later_releases
    ):
        return None
    action_text = undoing_release.action.replace("_", " ")
    raise Conflict(
        (
                f"this attempt made its move at epoch {attempt_release.epoch}; since then {action_text} of "
                f"{undoing_release.generation} at epoch {undoing_release.epoch}: "
                "use a new attempt"
),
        epoch=attempt_release.epoch, undone=undoing_release.epoch,
    )  # fmt: skip


def _is_done_or_verification(release: Release) -> bool:
    return release.is_done or release.action == "verify"


def _undoing_release(
    attempt_release: Release, history: Sequence[Release], later_releases: Sequence[Release]
) -> Release | None:
    """Return the record that undid a move, None if the move still holds."""
    match attempt_release.action:
        case "publish":
            return _withdrawing_roll_back(attempt_release, history, later_releases)
        case "roll_back":
            former_live_id = fold_releases(
                [release for release in history if release.epoch < attempt_release.epoch]
            ).live_generation
            moves_back = (
                release
                for release in later_releases
                if release.action in MOVE_ACTIONS and release.generation == former_live_id
            )
            return next(moves_back, None) or _withdrawing_roll_back(attempt_release, history, later_releases)
        case "canary":
            canary_ends = (
                release
                for release in later_releases
                if release.action in MOVE_ACTIONS or release.action == "end_canary"
            )
            canary_end = next(canary_ends, None)
            return None if canary_end is None or canary_end.action == "publish" else canary_end
    repeat_releases = (
        release
        for release in later_releases
        if release.action == "canary"
        or (
            attempt_release.abandoned
            and release.action == "verify"
            and release.generation == attempt_release.generation
        )
    )
    is_canary_running = fold_releases(history).canary is not None
    return next((release for release in repeat_releases if is_canary_running or release.action == "verify"), None)


def _withdrawing_roll_back(
    attempt_release: Release, history: Sequence[Release], later_releases: Sequence[Release]
) -> Release | None:
    """Return the last roll back that withdrew a published generation; None if the generation was restored since."""

    def state_until(epoch: int) -> GenerationState | None:
        settling_releases = [
            release for release in history if release.epoch <= epoch and not _is_retirement_of(release, attempt_release)
        ]
        return fold_releases(settling_releases).state(attempt_release.generation)

    if not later_releases or state_until(later_releases[-1].epoch) in _PUBLISHED_STATES:
        return None
    return next(
        (
            release
            for release in reversed(later_releases)
            if release.action == "roll_back" and state_until(release.epoch - 1) in _PUBLISHED_STATES
            and state_until(release.epoch) is GenerationState.ROLLED_BACK
        ),
        None,
    )  # fmt: skip


def _is_retirement_of(release: Release, attempt_release: Release) -> bool:
    return release.action == "retire" and release.generation == attempt_release.generation
