"""The life of a generation: which step is allowed from which state, and what a history of releases means. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cache.errors import Conflict
from cache.releases import MOVES, Release


class State(StrEnum):
    """Where a generation stands."""

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
"""On its way to being live."""

ALLOWED: Final[Mapping[str, frozenset[State]]] = {
    # A night may be begun, loaded and verified again at any time before it is live: retries find their own work.
    "begin": UNFINISHED | {State.REFUSED, State.ABANDONED},
    "load": UNFINISHED | {State.REFUSED, State.ROLLED_BACK, State.ABANDONED},
    "verify": frozenset({State.LOADED, State.VERIFIED, State.REFUSED, State.ROLLED_BACK}),
    "publish": frozenset({State.VERIFIED}),
    "roll_back": frozenset({State.SUPERSEDED}),
    "refuse": UNFINISHED | {State.REFUSED, State.ROLLED_BACK},
    "abandon": UNFINISHED | {State.REFUSED},
    "retire": frozenset(
        {State.SUPERSEDED, State.REFUSED, State.ROLLED_BACK, State.ABANDONED, State.RETIRED}
    ),
}
"""Action -> states of the generation from which it may be taken."""

_JUDGEMENTS = frozenset({"refuse", "verify", "abandon", "retire"})


def demand(action: str, generation: str, state: State | None) -> None:
    """Raises Conflict unless the state machine allows the action now; None = a generation nobody has begun."""
    if state is None and action in ("begin", "load", "abandon"):
        return
    if state not in ALLOWED[action]:
        allowed = ", ".join(sorted(ALLOWED[action]))
        raise Conflict(
            f"cannot {action.replace('_', ' ')} {generation}: it is {state or 'unknown'}, not one of {allowed}",
            generation=generation,
            state=str(state),
            action=action,
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the completed releases say: who is live, who was superseded when, what must never come back."""

    live: str | None = None
    live_epoch: int = 0
    epoch: int = 0
    states: Mapping[str, State] | None = None
    superseded_at: Mapping[str, float] | None = None
    pinned: Mapping[str, float | None] | None = None

    def state(self, generation: str) -> State | None:
        """The state that release records prove; None when they do not mention the generation."""
        return (self.states or {}).get(generation)

    @property
    def previous(self) -> str | None:
        """The newest superseded generation; never a refused, rolled-back or retired one."""
        return newest_superseded(self.states or {}, self.superseded_at or {})

    def is_pinned(self, generation: str, now: float) -> bool:
        """Whether a pin holds the generation at `now` (Unix seconds)."""
        pins = self.pinned or {}
        if generation not in pins:
            return False
        expires_at = pins[generation]
        return expires_at is None or now < expires_at


def newest_superseded(
    states: Mapping[str, State], superseded_at: Mapping[str, float], *, without: Iterable[str] = ()
) -> str | None:
    """The generation that a rollback would land on."""
    left_out = set(without)
    found = [
        each for each, state in states.items() if state is State.SUPERSEDED and each not in left_out
    ]
    return max(found, key=lambda each: superseded_at.get(each, 0.0), default=None)


def fold(releases: Sequence[Release]) -> Ledger:
    """The ledger of a history; an intent that was never completed changes nothing but the epoch."""
    states: dict[str, State] = {}
    superseded_at: dict[str, float] = {}
    pinned: dict[str, float | None] = {}
    live: str | None = None
    live_epoch = epoch = 0
    for release in sorted(releases, key=lambda each: each.epoch):
        epoch = max(epoch, release.epoch)
        if release.action in MOVES and not release.done:
            continue
        generation = release.generation
        if release.action in _JUDGEMENTS and states.get(generation) in (
            State.LIVE,
            State.RETIRED,
        ):
            # What readers follow is decided by the pointer alone, and what is removed stays removed.
            continue
        match release.action:
            case "publish" | "restore":
                if live is not None and live != generation:
                    states[live] = State.SUPERSEDED
                    superseded_at[live] = release.at
                states[generation], live, live_epoch = State.LIVE, generation, release.epoch
                superseded_at.pop(generation, None)
            case "roll_back":
                if live is not None and live != generation:
                    states[live] = State.ROLLED_BACK
                    superseded_at[live] = release.at
                states[generation], live, live_epoch = State.LIVE, generation, release.epoch
                superseded_at.pop(generation, None)
            case "refuse":
                states[generation] = State.REFUSED
            case "verify":
                # Of a superseded one it only states the manifest that was checked.
                if states.get(generation) is not State.SUPERSEDED:
                    states[generation] = State.VERIFIED
            case "abandon":
                states[generation] = State.ABANDONED
            case "retire":
                states[generation] = State.RETIRED
                superseded_at.pop(generation, None)
            case "pin":
                pinned[generation] = release.expires_at
            case "unpin":
                pinned.pop(generation, None)
    return Ledger(live, live_epoch, epoch, states, superseded_at, pinned)
