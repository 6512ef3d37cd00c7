"""Mistakes planted in the release code, each of which a random run must find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cache.control import states
from cache.control.states import GenerationState, Ledger
from cache.store.releases import Pointer
from precompute.releases import moves, recovery, release_log, sweep
from precompute.releases.release_log import Releases
from tests.life import Bias
from tests.memory import MemoryRedis

Plant = Callable[[pytest.MonkeyPatch], None]


def _previous_may_be_bad(patch: pytest.MonkeyPatch) -> None:
    real = states.newest_superseded

    def find_newest_with_rolled_back(state_by_generation: Any, left_in: Any) -> str | None:
        state_substitutes = {GenerationState.ROLLED_BACK: GenerationState.SUPERSEDED}
        return real(
            {
                generation_id: state_substitutes.get(state, state)
                for generation_id, state in state_by_generation.items()
            },
            left_in,
        )

    patch.setattr(states, "newest_superseded", find_newest_with_rolled_back)


def _a_roll_back_may_go_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "_jumped_over", lambda *_arguments: [])


def _gates_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moves, "_demand_gates", lambda *_arguments: None)


def _epoch_follows_the_clock(patch: pytest.MonkeyPatch) -> None:
    real = Releases.record

    def record(self: Releases, *arguments: Any, expected: int | None = None, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "history", list)
            return real(self, *arguments, **options)

    patch.setattr(Releases, "record", record)


def _pointer_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    real = MemoryRedis.move

    def move(self: MemoryRedis, argv: list[bytes]) -> Any:
        stored_pointer = self.data.get(self.keys.live)
        epoch = Pointer.from_bytes(stored_pointer).epoch if stored_pointer else 0
        return real(self, [str(epoch).encode(), *argv[1:]])

    patch.setattr(MemoryRedis, "move", move)


def _intents_count_as_done(patch: pytest.MonkeyPatch) -> None:
    real = states.fold_releases

    def fold(releases: Any) -> Ledger:
        return real([replace(release_record, is_done=True) for release_record in releases])

    for owner in (release_log, sweep):
        patch.setattr(owner, "fold_releases", fold)


def _pins_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "is_pinned", lambda *_arguments: False)


def _holders_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sweep, "_generations_in_use", lambda _releases: set())


def _rows_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    real = MemoryRedis.move
    patch.setattr(MemoryRedis, "move", lambda self, argv: real(self, [*argv[:2], b"", *argv[3:]]))


def _an_attempt_is_recognised_however_old(patch: pytest.MonkeyPatch) -> None:
    real = MemoryRedis.move

    def move(self: MemoryRedis, argv: list[bytes]) -> Any:
        stored_pointer, to = self.data.get(self.keys.live), Pointer.from_bytes(argv[1])
        if stored_pointer is not None:
            pointer = Pointer.from_bytes(stored_pointer)
            if (pointer.attempt, pointer.generation) == (to.attempt, to.generation):
                return [1, stored_pointer]
        return real(self, argv)

    patch.setattr(MemoryRedis, "move", move)


def _retries_publish_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moves, "pointer_of_attempt", lambda *_arguments: None)
    patch.setitem(states.TRANSITIONS, "publish", dict.fromkeys([*GenerationState], GenerationState.LIVE))
    patch.setitem(states.STATES_BY_ACTION, "publish", frozenset(GenerationState))


def _moves_are_not_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Releases, "settle", Releases.history)


def _rolled_back_is_superseded(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(states.STATE_OF_REPLACED, "roll_back", GenerationState.SUPERSEDED)


def _a_roll_back_may_be_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_roll_back_in_doubt", lambda _view: None)


def _old_pages_come_back(patch: pytest.MonkeyPatch) -> None:
    for owner in (sweep, recovery):
        patch.setattr(owner, "unlink_recorded", lambda *_arguments, **_options: 0)


def _just_left_is_long_ago(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sweep, "_seconds_since_left", lambda *_arguments: float("inf"))


def _older_data_is_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moves, "_demand_newer", lambda *_arguments: None)


def _refused_is_published(patch: pytest.MonkeyPatch) -> None:
    allowed = frozenset({GenerationState.VERIFIED, GenerationState.REFUSED})
    patch.setitem(states.TRANSITIONS, "publish", dict.fromkeys(allowed, GenerationState.LIVE))
    patch.setitem(states.STATES_BY_ACTION, "publish", allowed)


def _canaries_are_not_protected(patch: pytest.MonkeyPatch) -> None:
    real = MemoryRedis.write_rows

    def mark_unprotected(self: MemoryRedis, argv: list[bytes]) -> int:
        return real(self, [argv[0], b"", *argv[2:]])

    patch.setattr(MemoryRedis, "write_rows", mark_unprotected)


DEFECTS: dict[str, Plant] = {
    name.removeprefix("_").replace("_", " "): plant
    for name, plant in list(globals().items())
    if name.startswith("_") and getattr(plant, "__module__", "") == __name__
}
"""What was planted -> how."""

_NO_OVERRIDES = dict.fromkeys(["pin", "unpin", "override", "canary", "end_canary"], 0)
_STEADY = dict.fromkeys(["wipe", "load", "clock back", "clock ahead"], 0)

BIASES: dict[str, Bias] = {
    "holders are ignored": Bias(
        operations=_NO_OVERRIDES | {"retire": 20},
        events=_STEADY | {"much later": 12, "cut off": 1, "restart": 0},
    ),
    "pins are ignored": Bias(
        operations={"pin": 10, "unpin": 0, "retire": 10, "canary": 0},
        events=_STEADY | {"much later": 8},
    ),
    "canaries are not protected": Bias(
        operations=_NO_OVERRIDES | {"canary": 12, "refuse": 10, "roll_back": 0, "retire": 0, "restore": 0},
        events={"wipe": 0, "load": 0},
    ),
    "old pages come back": Bias(
        operations={"retire": 20, "restore": 8, "canary": 0, "end_canary": 0, "pin": 0, "override": 0, "refuse": 0},
        events={"save": 5, "load": 5, "a day later": 6, "clock back": 0, "cut off": 0},
        steps=120,
    ),
    "rows are not looked at": Bias(
        operations=_NO_OVERRIDES | {"refuse": 12, "publish": 12, "verify": 5, "retire": 1, "roll_back": 1,
        "restore": 1},
        events=_STEADY,
    ),
    "an attempt is recognised however old": Bias(
        operations=_NO_OVERRIDES
        | {"restore": 30, "publish": 3, "roll_back": 2, "verify": 1, "retire": 0, "refuse": 0},
        events=dict.fromkeys(["a day later", "clock back", "clock ahead", "cut off"], 0)
        | {"save": 10, "load": 10, "wipe": 10, "later": 1, "much later": 1},
        killed=0.02,
        repeated=0.3,
        steps=120,
    ),
    "a roll back may be forgotten": Bias(
        operations=_NO_OVERRIDES | {"roll_back": 20, "restore": 6, "refuse": 0, "end_canary": 2},
        events={"wipe": 2},
        killed=0.3,
        wiped_when_killed=0.8,
    ),
}  # fmt: skip
"""What was planted -> lives in which it shows often."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within the block, the release code makes this mistake."""
    with pytest.MonkeyPatch.context() as patch:
        DEFECTS[name](patch)
        yield
