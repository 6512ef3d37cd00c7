"""A move of the pointer: what every one demands of a generation, and the compare-and-set that makes it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cache.errors import Conflict, UnknownGeneration
from cache.format.manifest import CUT_CHARS
from cache.formats import FORMATS, MANIFEST, RELEASE
from cache.store.artefacts import read_manifest
from cache.store.releases import MOVES, Action, Pointer
from precompute.control.reader_formats import MOVES as MOVE_FORMATS
from precompute.control.reader_formats import demand_readers
from precompute.control.rows import RegistryRow
from precompute.control.states import ALLOWED, State, demand, fold
from precompute.releases.judgements import Judgements
from precompute.releases.release_log import ReleaseView, standing

Report = Mapping[str, Any]
"""Report of verify: `baseline`, the generation that was live then (null: none), beside what others look at."""


@dataclass(frozen=True, slots=True)
class MoveResult:
    """Result of a move of the pointer; `has_moved` is False when this attempt, or another, had done it already."""

    pointer: Pointer
    has_moved: bool


class Moves(Judgements):
    """Checks and commits that publishes, roll backs and canaries share."""

    def _demand_gates(self, generation: str, live: str | None, verified: Report | None) -> None:
        """Raises Conflict unless all gates passed, and, with verify's report, in comparison with what is live."""
        with files_of(generation):
            gates = read_manifest(self.store, generation).gates
        failed = [str(gate["rule"]) for gate in gates if not gate["passed"]]
        if failed or not gates:
            failure_text = f"failed {', '.join(failed)}" if failed else "ran through no gate"
            raise Conflict(
                f"{generation} {failure_text}: run `verify {generation}` first",
                generation=generation,
            )
        if verified is not None and (baseline := verified.get("baseline")) != live:
            raise Conflict(
                f"{generation} was verified against {baseline or 'nothing'}, live is {live or 'nothing'}: "
                f"run `verify {generation}` again",
                generation=generation, baseline=baseline, live=live,
            )  # fmt: skip

    def _demand_readers(self, generation: str) -> None:
        """Raises Refused unless every replica that beats reads that generation and this release's pointer."""
        with files_of(generation):
            version = read_manifest(self.store, generation).format
        demand_readers(self.control, {MANIFEST: version}, f"{generation} has")
        formats = {name: FORMATS[name].written for name in MOVE_FORMATS}
        demand_readers(self.control, formats, f"this release ({RELEASE}) writes")

    def _demand_newer(self, generation: str, live: str | None) -> None:
        if live is not None and generation[:CUT_CHARS] < live[:CUT_CHARS]:
            raise Conflict(
                f"{generation} is older than {live}, which is live; going back is a roll back, not a publish",
                generation=generation,
                live=live,
            )

    def _know(self, generation: str, view: ReleaseView) -> None:
        state = view.ledger.state(generation)
        if generation not in view.rows and state is not None:
            rows = {generation: RegistryRow(state, self.clock(), "restored")}
            self.control.write_rows(rows, expected_epoch=view.epoch)

    def _commit(
        self,
        to: Pointer,
        view: ReleaseView,
        rows: Mapping[str, RegistryRow],
        action: Action,
        *,
        live: bool = True,
    ) -> MoveResult:
        """Compare-and-set the pointer to what an intent says, then write down that it is done."""
        allowed = ALLOWED[action] if live else (State.LIVE,)
        # Much may have passed since the intent: what is superseded is superseded now.
        rows = {generation_id: replace(row, at=self.clock()) for generation_id, row in rows.items()}
        self._demand_still(to, view, action)
        moved = self.control.move(to, expected_epoch=view.epoch, rows=rows, allowed=allowed)
        if moved is None:
            raise Conflict(
                f"another publisher moved the pointer before {to.generation} could be made live; try again"
                if live
                else "another publisher moved the pointer meanwhile; try again"
            )
        self.complete(moved.epoch)
        return MoveResult(moved, has_moved=True)

    def _demand_still(self, to: Pointer, view: ReleaseView, action: Action) -> None:
        """Raises Conflict when the history says otherwise by now: a Redis that lost its newest rows would not."""
        history = self.history()
        ledger = fold(history)
        if ledger.live_epoch != view.ledger.live_epoch:
            live_release = next(
                release for release in history if release.epoch == ledger.live_epoch
            )
            if live_release.attempt == to.attempt:
                return  # a repeat of this very move, which the pointer recognises
            raise Conflict("another publisher moved the pointer meanwhile; try again")
        if action in MOVES and to.previous and ledger.state(to.previous) is State.RETIRED:
            raise Conflict(f"{to.previous} was retired meanwhile; try again")
        if action != "end_canary":
            about = to.canary.generation if to.canary is not None else to.generation
            demand(action, about, standing(about, ledger, view.rows.get(about)))


@contextmanager
def files_of(generation: str) -> Iterator[None]:
    """Missing files become a Conflict that says so."""
    try:
        yield
    except UnknownGeneration as error:
        raise Conflict(
            f"the files of {generation} are gone, so it cannot be made live: {error.message}",
            generation=generation,
        ) from error
