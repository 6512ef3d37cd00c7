"""State machine of a generation: its transitions, and the ledger computed from a history of releases. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cache.errors import Conflict
from cache.store.releases import MOVE_ACTIONS, POINTER_ACTIONS, Canary, Release


class GenerationState(StrEnum):
    """State of a generation, from `begun` to a final one."""

    BEGUN = "begun"
    LOADED = "loaded"
    VERIFIED = "verified"
    LIVE = "live"
    SUPERSEDED = "superseded"
    RETIRED = "retired"
    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"
    ABANDONED = "abandoned"


UNFINISHED_STATES: Final = frozenset({GenerationState.BEGUN, GenerationState.LOADED, GenerationState.VERIFIED})
"""States of a generation that may still become live."""


def _same_states(*states: GenerationState) -> dict[GenerationState | None, GenerationState]:
    return {state: state for state in states}


def _transitions_to(
    target_state: GenerationState, *states: GenerationState | None
) -> dict[GenerationState | None, GenerationState]:
    return dict.fromkeys(states, target_state)


_REJECTED_STATES = (GenerationState.REFUSED, GenerationState.ROLLED_BACK, GenerationState.ABANDONED)

TRANSITIONS: Final[Mapping[str, Mapping[GenerationState | None, GenerationState]]] = {
    # A retry may find its own work done. A rejected generation stays rejected when it is built again, until it is
    # verified.
    "begin": _transitions_to(GenerationState.BEGUN, None)
    | _same_states(*UNFINISHED_STATES, GenerationState.REFUSED, GenerationState.ABANDONED),
    "load": _transitions_to(GenerationState.LOADED, None, GenerationState.BEGUN)
    | _same_states(GenerationState.LOADED, GenerationState.VERIFIED, *_REJECTED_STATES),
    "verify": _transitions_to(
        GenerationState.VERIFIED, GenerationState.LOADED, GenerationState.VERIFIED, *_REJECTED_STATES
    ),
    "refuse": _transitions_to(GenerationState.REFUSED, *UNFINISHED_STATES, *_REJECTED_STATES),
    "override": _same_states(*UNFINISHED_STATES, *_REJECTED_STATES),
    "publish": {GenerationState.VERIFIED: GenerationState.LIVE},
    "roll_back": {GenerationState.SUPERSEDED: GenerationState.LIVE},
    "restore": _same_states(GenerationState.LIVE),
    "canary": _same_states(GenerationState.VERIFIED),
    "end_canary": _same_states(GenerationState.VERIFIED),
    "abandon": _transitions_to(
        GenerationState.ABANDONED, None, *UNFINISHED_STATES, GenerationState.REFUSED, GenerationState.ABANDONED
    ),
    "retire": _transitions_to(
        GenerationState.RETIRED, GenerationState.SUPERSEDED, GenerationState.RETIRED, *_REJECTED_STATES
    ),
}
"""Action -> state of the generation -> its next state; a missing entry means that the action is not allowed.

The state None is a generation that was never begun.
"""

STATE_OF_REPLACED: Final[Mapping[str, GenerationState]] = {
    "publish": GenerationState.SUPERSEDED, "restore": GenerationState.SUPERSEDED,
    "roll_back": GenerationState.ROLLED_BACK,
}  # fmt: skip
"""Action -> state of the formerly live generation when another one replaces it.

A roll back also sets all generations that were live after its target to rolled back.
"""

STATES_BY_ACTION: Final[Mapping[str, frozenset[GenerationState]]] = {
    action: frozenset(state for state in rows if state is not None) for action, rows in TRANSITIONS.items()
}
"""Action -> states of the generation in which it is allowed."""


VERB_BY_ACTION: Final = {"canary": "start a canary of"}
"""Action -> verb phrase for messages, if the action's name is not a verb."""


def forbidden_action_remedy(action: str, generation: str, state: GenerationState | None) -> str:
    """Return the remedy to append to the error about a forbidden action; empty if there is none."""
    program = "larder"
    go_back_remedy = f"; return to it with `{program} roll-back --to {generation}`"
    verify_remedy = f"; run `{program} verify {generation}` first"
    match action, state:
        case (("publish" | "canary" | "verify"), GenerationState.SUPERSEDED):
            return go_back_remedy
        case (("roll_back" | "canary" | "publish"), GenerationState.LIVE):
            return "; readers have it already"
        case "roll_back", GenerationState.VERIFIED:
            return f"; it was never live: `{program} publish {generation}`"
        case (("publish" | "canary"), GenerationState.BEGUN):
            return f"; run `{program} load {generation}`, then `verify`"
        case (
            ("publish" | "canary"),
            (
                GenerationState.LOADED
                | GenerationState.REFUSED
                | GenerationState.ROLLED_BACK
                | GenerationState.ABANDONED
            ),
        ):
            return verify_remedy
        case "verify", GenerationState.BEGUN:
            return f"; run `{program} load {generation}` first"
        case _, GenerationState.RETIRED:
            return "; its pages and files are being removed: run a night with another cut"
        case _, None:
            return f"; `{program} status` lists those there are"
        case "begin", GenerationState.SUPERSEDED:
            return go_back_remedy
        case "begin", GenerationState.ROLLED_BACK:
            return f"; {rolled_back_remedy(generation)}"
        case (("override" | "refuse" | "retire"), GenerationState.LIVE):
            return f"; roll it back first: `{program} roll-back --reason ...`"
    return ""


def rolled_back_remedy(generation: str, *, can_be_published: bool = True) -> str:
    """Return the remedy to append to the error about a night that makes a rolled-back generation's lists again.

    A generation cannot be published once a newer one is live.
    """
    way_back = f"return to it with `larder verify {generation}`, then `larder publish {generation}`"
    if not can_be_published:
        way_back = "remove it with `larder retire` and run the night again"
    return (
        "the same files, settings and model make the same lists: correct them first; or, if it was rolled back by "
        f"mistake, {way_back}"
    )


def demand_allowed(action: str, generation: str, state: GenerationState | None) -> None:
    """Raise Conflict unless the state machine allows the action in this state; None: the generation was never begun."""
    if state not in TRANSITIONS[action]:
        allowed_states = ", ".join(sorted(STATES_BY_ACTION[action]))
        verb_phrase = VERB_BY_ACTION.get(action, action.replace("_", " "))
        remedy = forbidden_action_remedy(action, generation, state)
        raise Conflict(
            f"cannot {verb_phrase} {generation}: it is {state or 'unknown'}, not one of {allowed_states}{remedy}",
            generation=generation,
            state=str(state),
            action=action,
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """Summary of the completed releases: the live generation, superseded generations, and unusable ones.

    `live_epoch` is the epoch of the newest pointer written, a canary's included; `epoch` the newest of any record.
    `left_epoch_by_generation`: epoch of the move that replaced a live generation; orders generations where the clock
    times in `superseded_at_by_generation` may not. `pin_expiry_by_generation`: generation -> expiry in Unix seconds,
    None: never. `overrides_by_generation`: generation -> rule -> reason.
    """

    live_generation: str | None = None
    live_epoch: int = 0
    epoch: int = 0
    state_by_generation: Mapping[str, GenerationState] = field(default_factory=dict)
    superseded_at_by_generation: Mapping[str, float] = field(default_factory=dict)
    left_epoch_by_generation: Mapping[str, int] = field(default_factory=dict)
    pin_expiry_by_generation: Mapping[str, float | None] = field(default_factory=dict)
    overrides_by_generation: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    canary: Canary | None = None

    def state(self, generation: str) -> GenerationState | None:
        """Return the state according to the release records; None if they do not mention the generation."""
        return self.state_by_generation.get(generation)

    @property
    def previous_generation(self) -> str | None:
        """Newest superseded generation; never a refused, rolled-back or retired one."""
        return newest_superseded(self.state_by_generation, self.left_epoch_by_generation)

    def is_pinned(self, generation: str, now_s: float) -> bool:
        """Return whether a pin protects the generation at `now_s` (Unix seconds)."""
        if generation not in self.pin_expiry_by_generation:
            return False
        expires_at = self.pin_expiry_by_generation[generation]
        return expires_at is None or now_s < expires_at


def newest_superseded(
    state_by_generation: Mapping[str, GenerationState], left_epoch_by_generation: Mapping[str, int]
) -> str | None:
    """Return the generation to which a roll back would return; None without one."""
    superseded_generations = [
        generation for generation, state in state_by_generation.items() if state is GenerationState.SUPERSEDED
    ]
    return max(superseded_generations, key=lambda generation: left_epoch_by_generation.get(generation, 0), default=None)


def fold_releases(releases: Sequence[Release]) -> Ledger:
    """Compute the ledger of a history; an intent that was never completed only advances the epoch."""
    state_by_generation: dict[str, GenerationState] = {}
    superseded_at_by_generation: dict[str, float] = {}
    left_epoch_by_generation: dict[str, int] = {}
    pin_expiry_by_generation: dict[str, float | None] = {}
    overrides_by_generation: dict[str, dict[str, str]] = {}
    canary: Canary | None = None
    live_generation: str | None = None
    live_epoch = epoch = 0
    for release in sorted(releases, key=lambda record: record.epoch):
        generation, action = release.generation, release.action
        epoch = max(epoch, release.epoch)
        if action in POINTER_ACTIONS and not release.is_done:
            continue
        if action in MOVE_ACTIONS:
            replaced_generations = [] if live_generation in (None, generation) else [live_generation]
            if action == "roll_back" and generation != live_generation:
                replaced_generations += _jumped_over(generation, state_by_generation, left_epoch_by_generation)
            for replaced_generation in replaced_generations:
                state_by_generation[replaced_generation] = STATE_OF_REPLACED[action]
                (superseded_at_by_generation[replaced_generation], left_epoch_by_generation[replaced_generation]) = (
                    release.at,
                    release.epoch,
                )
                if action == "roll_back":  # its overrides end with the roll back
                    overrides_by_generation.pop(replaced_generation, None)
            state_by_generation[generation] = GenerationState.LIVE
            superseded_at_by_generation.pop(generation, None)
            left_epoch_by_generation.pop(generation, None)
            live_generation, live_epoch, canary = generation, release.epoch, None
        elif action == "canary":
            canary = Canary(generation, release.percent or 0.0, release.at, release.rule)
            live_epoch = release.epoch
        elif action == "end_canary":
            canary, live_epoch = None, release.epoch
            if release.abandoned:
                state_by_generation[generation] = GenerationState.ABANDONED
        elif action == "pin":
            pin_expiry_by_generation[generation] = release.expires_at
        elif action == "unpin":
            pin_expiry_by_generation.pop(generation, None)
        elif action == "override":
            overrides_by_generation.setdefault(generation, {})[release.rule] = release.reason
        elif action == "retire":
            # Files of a retired generation are being removed, so its state is final. The live generation was made live
            # before that.
            if generation != live_generation:
                state_by_generation[generation] = GenerationState.RETIRED
                superseded_at_by_generation.pop(generation, None)
                left_epoch_by_generation.pop(generation, None)
        else:
            # A late judgement changes nothing: the pointer alone decides what readers follow, and a retirement is
            # final. The earlier states of a generation without records are only in the registry; it counts as loaded.
            prior_state = state_by_generation.get(generation, GenerationState.LOADED)
            if (state := TRANSITIONS[action].get(prior_state)) is not None:
                state_by_generation[generation] = state
    return Ledger(
        live_generation,
        live_epoch,
        epoch,
        state_by_generation,
        superseded_at_by_generation,
        left_epoch_by_generation,
        pin_expiry_by_generation,
        overrides_by_generation,
        canary,
    )


def _jumped_over(
    target_generation: str,
    state_by_generation: Mapping[str, GenerationState],
    left_epoch_by_generation: Mapping[str, int],
) -> list[str]:
    """Return superseded generations that were live after the target; a later roll back to them would go forward."""
    target_epoch = left_epoch_by_generation.get(target_generation, 0)
    return [
        generation
        for generation, state in state_by_generation.items()
        if state is GenerationState.SUPERSEDED
        and generation != target_generation
        and left_epoch_by_generation.get(generation, 0) > target_epoch
    ]
