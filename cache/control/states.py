"""State machine of a generation: its transitions, and the ledger that a history of releases adds up to. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cache.errors import Conflict
from cache.store.releases import MOVE_ACTIONS, POINTER_ACTIONS, Canary, Release


class State(StrEnum):
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


UNFINISHED: Final = frozenset({State.BEGUN, State.LOADED, State.VERIFIED})
"""States of a generation that may still become live."""


def _stays(*states: State) -> dict[State | None, State]:
    return {state: state for state in states}


def _all_to(target: State, *states: State | None) -> dict[State | None, State]:
    return dict.fromkeys(states, target)


_REJECTED = (State.REFUSED, State.ROLLED_BACK, State.ABANDONED)

TRANSITIONS: Final[Mapping[str, Mapping[State | None, State]]] = {
    # Retries find their own work; what was rejected stays so, however often it is made, until it is verified again.
    "begin": _all_to(State.BEGUN, None) | _stays(*UNFINISHED, State.REFUSED, State.ABANDONED),
    "load": _all_to(State.LOADED, None, State.BEGUN)
    | _stays(State.LOADED, State.VERIFIED, *_REJECTED),
    "verify": _all_to(State.VERIFIED, State.LOADED, State.VERIFIED, *_REJECTED),
    "refuse": _all_to(State.REFUSED, *UNFINISHED, *_REJECTED),
    "override": _stays(*UNFINISHED, *_REJECTED),
    "publish": {State.VERIFIED: State.LIVE},
    "roll_back": {State.SUPERSEDED: State.LIVE},
    "restore": _stays(State.LIVE),
    "canary": _stays(State.VERIFIED),
    "end_canary": _stays(State.VERIFIED),
    "abandon": _all_to(State.ABANDONED, None, *UNFINISHED, State.REFUSED, State.ABANDONED),
    "retire": _all_to(State.RETIRED, State.SUPERSEDED, State.RETIRED, *_REJECTED),
}
"""Action -> state of the generation -> its next state; a missing entry means that the action is not allowed.

The state None is a generation that was never begun.
"""

LEAVES: Final[Mapping[str, State]] = {
    "publish": State.SUPERSEDED, "restore": State.SUPERSEDED, "roll_back": State.ROLLED_BACK,
}  # fmt: skip
"""Action -> state of the formerly live generation when another one takes its place.

A roll back also jumps over all generations that were live after its target: they all become rolled back.
"""

ALLOWED: Final[Mapping[str, frozenset[State]]] = {
    action: frozenset(state for state in rows if state is not None)
    for action, rows in TRANSITIONS.items()
}
"""Action -> states of the generation from which it may be taken."""


VERB_BY_ACTION: Final = {"canary": "start a canary of"}
"""Action -> verb phrase for messages, for actions whose name is no verb."""


def remedy_of(action: str, generation: str, state: State | None) -> str:
    """Return the remedy for an action that the state does not allow; empty if there is none."""
    run = "larder"
    go_back = f"; go back to it with `{run} roll-back --to {generation}`"
    verify = f"; run `{run} verify {generation}` first"
    match action, state:
        case (("publish" | "canary" | "verify"), State.SUPERSEDED):
            return go_back
        case (("roll_back" | "canary" | "publish"), State.LIVE):
            return "; readers have it already"
        case "roll_back", State.VERIFIED:
            return f"; it was never live: `{run} publish {generation}`"
        case (("publish" | "canary"), State.BEGUN):
            return f"; run `{run} load {generation}`, then `verify`"
        case (
            ("publish" | "canary"),
            (State.LOADED | State.REFUSED | State.ROLLED_BACK | State.ABANDONED),
        ):
            return verify
        case "verify", State.BEGUN:
            return f"; run `{run} load {generation}` first"
        case _, State.RETIRED:
            return "; its pages and files are being removed: run a night with another cut"
        case _, None:
            return f"; `{run} status` lists those there are"
        case "begin", State.SUPERSEDED:
            return go_back
        case "begin", State.ROLLED_BACK:
            return (
                "; a night of the same inputs makes the same lists: change these, or let it go live all the same by "
                f"`{run} verify {generation}` and `{run} publish {generation}`"
            )
        case (("override" | "refuse" | "retire"), State.LIVE):
            return f"; roll it back first: `{run} roll-back --reason ...`"
    return ""


def demand(action: str, generation: str, state: State | None) -> None:
    """Raise Conflict unless the state machine allows the action in this state; None: the generation was never begun."""
    if state not in TRANSITIONS[action]:
        allowed = ", ".join(sorted(ALLOWED[action]))
        verb = VERB_BY_ACTION.get(action, action.replace("_", " "))
        remedy = remedy_of(action, generation, state)
        raise Conflict(
            f"cannot {verb} {generation}: it is {state or 'unknown'}, not one of {allowed}{remedy}",
            generation=generation,
            state=str(state),
            action=action,
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """Summary of the completed releases: the live generation, the superseded ones, and those never to be used again.

    `live_epoch` is the epoch of the newest pointer written, a canary's included; `epoch` the newest of any record.
    `left_in`: the epoch of the move that took readers away; it orders what clocks (`superseded_at`) may not.
    `pinned`: generation -> expiry in Unix seconds, None = never. `overrides`: generation -> rule -> reason.
    """

    live: str | None = None
    live_epoch: int = 0
    epoch: int = 0
    states: Mapping[str, State] = field(default_factory=dict)
    superseded_at: Mapping[str, float] = field(default_factory=dict)
    left_in: Mapping[str, int] = field(default_factory=dict)
    pinned: Mapping[str, float | None] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    canary: Canary | None = None

    def state(self, generation: str) -> State | None:
        """The state that release records prove; None when they do not mention the generation."""
        return self.states.get(generation)

    @property
    def previous(self) -> str | None:
        """The newest superseded generation; never a refused, rolled-back or retired one."""
        return newest_superseded(self.states, self.left_in)

    def is_pinned(self, generation: str, now_s: float) -> bool:
        """True if a pin holds the generation at `now_s` (Unix seconds)."""
        if generation not in self.pinned:
            return False
        expires_at = self.pinned[generation]
        return expires_at is None or now_s < expires_at


def newest_superseded(states: Mapping[str, State], left_in: Mapping[str, int]) -> str | None:
    """The generation that a rollback would land on."""
    superseded_generations = [
        generation for generation, state in states.items() if state is State.SUPERSEDED
    ]
    return max(
        superseded_generations, key=lambda generation: left_in.get(generation, 0), default=None
    )


def fold(releases: Sequence[Release]) -> Ledger:
    """The ledger of a history; an intent that was never completed changes nothing but the epoch."""
    states: dict[str, State] = {}
    superseded_at: dict[str, float] = {}
    left_in: dict[str, int] = {}
    pinned: dict[str, float | None] = {}
    overrides: dict[str, dict[str, str]] = {}
    canary: Canary | None = None
    live: str | None = None
    live_epoch = epoch = 0
    for release in sorted(releases, key=lambda record: record.epoch):
        generation, action = release.generation, release.action
        epoch = max(epoch, release.epoch)
        if action in POINTER_ACTIONS and not release.is_done:
            continue
        if action in MOVE_ACTIONS:
            replaced_generations = [] if live in (None, generation) else [live]
            if action == "roll_back" and generation != live:
                replaced_generations += _jumped_over(generation, states, left_in)
            for replaced_generation in replaced_generations:
                states[replaced_generation] = LEAVES[action]
                superseded_at[replaced_generation], left_in[replaced_generation] = (
                    release.at,
                    release.epoch,
                )
                if action == "roll_back":  # what let it pass then does not let it pass again
                    overrides.pop(replaced_generation, None)
            states[generation] = State.LIVE
            superseded_at.pop(generation, None)
            left_in.pop(generation, None)
            live, live_epoch, canary = generation, release.epoch, None
        elif action == "canary":
            canary = Canary(generation, release.percent or 0.0, release.at, release.rule)
            live_epoch = release.epoch
        elif action == "end_canary":
            canary, live_epoch = None, release.epoch
            if release.abandoned:
                states[generation] = State.ABANDONED
        elif action == "pin":
            pinned[generation] = release.expires_at
        elif action == "unpin":
            pinned.pop(generation, None)
        elif action == "override":
            overrides.setdefault(generation, {})[release.rule] = release.reason
        elif action == "retire":
            # A fact by now, whatever the records say: its files are going. What is live was made so before that.
            if generation != live:
                states[generation] = State.RETIRED
                superseded_at.pop(generation, None)
                left_in.pop(generation, None)
        else:
            # A judgement that comes late changes nothing: what readers follow is decided by the pointer alone, what
            # is removed stays removed. Of what no record mentions yet, only the registry knew how far it was.
            prior_state = states.get(generation, State.LOADED)
            if (state := TRANSITIONS[action].get(prior_state)) is not None:
                states[generation] = state
    return Ledger(
        live, live_epoch, epoch, states, superseded_at, left_in, pinned, overrides, canary
    )


def _jumped_over(target: str, states: Mapping[str, State], left_in: Mapping[str, int]) -> list[str]:
    """Generations that were live after the target last was: landing there again would go forward."""
    target_epoch = left_in.get(target, 0)
    return [
        generation
        for generation, state in states.items()
        if state is State.SUPERSEDED
        and generation != target
        and left_in.get(generation, 0) > target_epoch
    ]
