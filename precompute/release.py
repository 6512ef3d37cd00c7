"""Publish, roll back, try out: every way the pointer moves, written down first."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cache.artefacts import read_manifest
from cache.errors import ConfigError, Conflict, UnknownGeneration
from cache.releases import Action, Canary, Pointer, done_path
from precompute.attempts import earlier
from precompute.control import Row
from precompute.governor import Governor
from precompute.judgements import Judgements
from precompute.load import unlink_pages
from precompute.release_log import CUT_CHARS, LOOK_TRIES, View, standing
from precompute.reload import load_missing, repair
from precompute.states import ALLOWED, State, demand, fold

Report = Mapping[str, Any]
"""What verify reports: `baseline`, the generation that was live then (null: none), beside what others look at."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move of the pointer did; `changed` is False when this attempt, or another, had done it already."""

    pointer: Pointer
    changed: bool


class Releases(Judgements):
    """The release history of one namespace and the moves that add to it."""

    def prepare(
        self,
        generation: str,
        *,
        attempt: str,
        verified: Report | None = None,
        governor: Governor | None = None,
    ) -> Moved | None:
        """Stream what Redis misses of a generation to be published; what happened if it was published already.

        With verify's report (`verified`), Conflict when something else is live than what it was compared with.
        """
        view = self.view()
        if (done := earlier(view.history, "publish", attempt, generation)) is not None:
            return Moved(done, changed=False)
        if (live := self._demand_publish(generation, view, verified)) is not None:
            return Moved(live, changed=False)
        with _files_of(generation):
            load_missing(self.control, self.control.keys, self.store, generation, governor=governor)
        return None

    def publish(
        self,
        generation: str,
        *,
        attempt: str,
        verified: Report | None = None,
        governor: Governor | None = None,
    ) -> Moved:
        """Make a verified generation live; a repeat of the same publish changes nothing. `verified`: see `prepare`."""
        moved = self.prepare(generation, attempt=attempt, verified=verified, governor=governor)
        if moved is not None:
            return moved
        view = self.view()
        if (live := self._demand_publish(generation, view, verified)) is not None:
            return Moved(live, changed=False)
        return self._move("publish", generation, view, attempt=attempt)

    def _demand_publish(
        self, generation: str, view: View, verified: Report | None
    ) -> Pointer | None:
        if view.pointer is not None and view.pointer.generation == generation:
            return view.pointer
        view.demand_agreement()
        ledger = view.ledger
        demand("publish", generation, standing(generation, ledger, view.rows.get(generation)))
        _demand_newer(generation, ledger.live)
        self._demand_gates(generation, ledger.live, verified)
        # No page may belong to a generation that the registry does not know.
        self._know(generation, view)
        return None

    def _demand_gates(self, generation: str, live: str | None, verified: Report | None) -> None:
        """Raises Conflict unless all gates passed, and, with verify's report, in comparison with what is live."""
        with _files_of(generation):
            gates = read_manifest(self.store, generation).gates
        failed = [str(each["rule"]) for each in gates if not each["passed"]]
        if failed or not gates:
            what = f"failed {', '.join(failed)}" if failed else "ran through no gate"
            raise Conflict(
                f"{generation} {what}: run `verify {generation}` first", generation=generation
            )
        if verified is not None and (baseline := verified.get("baseline")) != live:
            raise Conflict(
                f"{generation} was verified against {baseline or 'nothing'}, live is {live or 'nothing'}: "
                f"run `verify {generation}` again",
                generation=generation, baseline=baseline, live=live,
            )  # fmt: skip

    def roll_back(self, *, to: str | None, reason: str, attempt: str) -> Moved:
        """Make an earlier generation live again; the one rolled back can never return without re-verification.

        Before the move only the existence and the length of its pages are looked at, so readers see it within a second
        however large it is; `mend` is to be called after it.
        """
        view = self.view()
        if (done := earlier(view.history, "roll_back", attempt, to)) is not None:
            return Moved(done, changed=False)
        target = to or view.ledger.previous
        if target is None:
            raise Conflict("there is no earlier generation to roll back to")
        if (live := self._demand_roll_back(target, view)) is not None:
            return Moved(live, changed=False)
        bad = view.ledger.live
        with _files_of(target):
            self.check_manifest(target, view.history)
            load_missing(self.control, self.control.keys, self.store, target)
        view = self.view()
        if view.ledger.live != bad:
            raise Conflict(
                f"{view.ledger.live} became live while {target} was being checked; is it to be rolled back as well?"
            )
        if (live := self._demand_roll_back(target, view)) is not None:
            return Moved(live, changed=False)
        return self._move("roll_back", target, view, attempt=attempt, reason=reason)

    def mend(self, generation: str, *, governor: Governor | None = None) -> list[str]:
        """Read the pages of the live generation back and repair what is damaged; the keys of the pages repaired.

        Does nothing for a generation that is not live by now.
        """
        if (pointer := self.control.pointer()) is None or pointer.generation != generation:
            return []
        return repair(self.control, self.control.keys, self.store, generation, governor=governor)

    def _demand_roll_back(self, target: str, view: View) -> Pointer | None:
        if view.pointer is not None and view.pointer.generation == target:
            return view.pointer
        view.demand_agreement()
        demand("roll_back", target, view.ledger.state(target))
        self._know(target, view)
        return None

    def _know(self, generation: str, view: View) -> None:
        state = view.ledger.state(generation)
        if generation not in view.rows and state is not None:
            rows = {generation: Row(state, self.clock(), "restored")}
            self.control.mark(rows, expected_epoch=view.epoch)

    def _move(
        self, action: Action, generation: str, view: View, *, attempt: str, reason: str = ""
    ) -> Moved:
        with _files_of(generation):
            manifest = read_manifest(self.store, generation)
        after, rows = self.outcome(action, generation, view, attempt=attempt, reason=reason)
        previous, now = after.previous, self.clock()
        release = self.record(
            action,
            generation,
            attempt=attempt,
            reason=reason,
            previous=previous,
            expected=view.epoch,
        )
        to = Pointer(generation, release.epoch, previous, attempt, published_at=now)
        try:
            return self._commit(to, view, rows, action)
        except Conflict as error:
            if error.details.get("state") == State.RETIRED:
                # Pages loaded for this move while a retirement removed them: nobody else would remove them.
                unlink_pages(self.control.client, self.control.keys, manifest)
            raise

    def refuse(self, generation: str, *, reason: str, attempt: str) -> None:
        """As any refusal; a canary ends first, so that no request is answered from it any more."""
        for _ in range(LOOK_TRIES):
            view = self.view()
            running = view.ledger.canary
            try:
                if running is not None and running.generation == generation:
                    self._end_canary(running, view, attempt=attempt, reason=reason, abandon=True)
                return super().refuse(generation, reason=reason, attempt=attempt)
            except Conflict:
                canary = self.view().ledger.canary
                if canary is None or canary.generation != generation:
                    raise  # it is no canary that stands in the way
        raise Conflict(
            f"{generation} was tried out again each time it was to be refused; try again"
        )

    def _commit(
        self, to: Pointer, view: View, rows: Mapping[str, Row], action: Action, *, live: bool = True
    ) -> Moved:
        """Compare-and-set the pointer to what an intent says, then write down that it is done."""
        allowed = ALLOWED[action] if live else (State.LIVE,)
        # Much may have passed since the intent: what is superseded is superseded now.
        rows = {each: replace(row, at=self.clock()) for each, row in rows.items()}
        self._demand_still(to, view, action)
        moved = self.control.move(to, expected_epoch=view.epoch, rows=rows, allowed=allowed)
        if moved is None:
            raise Conflict(
                f"another publisher moved the pointer before {to.generation} could be made live; try again"
                if live
                else "another publisher moved the pointer meanwhile; try again"
            )
        self.store.write_once(done_path(moved.epoch), b"")
        return Moved(moved, changed=True)

    def _demand_still(self, to: Pointer, view: View, action: Action) -> None:
        """Raises Conflict when the history says otherwise by now: a Redis that lost its newest rows would not."""
        history = self.history()
        ledger = fold(history)
        if ledger.live_epoch != view.ledger.live_epoch:
            newest = next(each for each in history if each.epoch == ledger.live_epoch)
            if newest.attempt == to.attempt:
                return  # a repeat of this very move, which the pointer recognises
            raise Conflict("another publisher moved the pointer meanwhile; try again")
        if action != "end_canary":
            about = to.canary.generation if to.canary is not None else to.generation
            demand(action, about, standing(about, ledger, view.rows.get(about)))

    def start_canary(
        self,
        generation: str,
        percent: float,
        attempt: str,
        *,
        verified: Report | None = None,
        event: str = "",
        governor: Governor | None = None,
    ) -> Moved:
        """Let a verified generation answer `percent` of the requests beside the live one; again: change its share.

        `verified`: see `prepare`.

        Raises Conflict when nothing is live, another canary runs, or the generation could not be published.
        """
        if not 0 < percent <= 100:
            raise ConfigError(f"a canary's share is above 0 and at most 100 %, not {percent}")
        view = self.view()
        if earlier(view.history, "canary", attempt, generation, percent) is not None:
            return Moved(_followed(view), changed=False)
        live = self._demand_canary(generation, view, verified)
        if view.ledger.canary is not None and view.ledger.canary.percent == percent:
            return Moved(live, changed=False)
        with _files_of(generation):
            load_missing(self.control, self.control.keys, self.store, generation, governor=governor)
        view = self.view()
        live = self._demand_canary(generation, view, verified)
        release = self.record(
            "canary",
            generation,
            attempt=attempt,
            previous=live.previous,
            percent=percent,
            rule=event,
            expected=view.epoch,
        )
        to = replace(
            live, epoch=release.epoch, attempt=attempt,
            canary=Canary(generation, percent, release.at, event),
        )  # fmt: skip
        return self._commit(to, view, {}, "canary", live=False)

    def _demand_canary(self, generation: str, view: View, verified: Report | None) -> Pointer:
        view.demand_agreement()
        running = view.ledger.canary
        if running is not None and running.generation != generation:
            raise Conflict(
                f"{running.generation} is being tried out: end that canary first",
                generation=running.generation,
            )
        if view.pointer is None:
            raise Conflict("nothing is live that a canary could be compared with: publish it")
        state = standing(generation, view.ledger, view.rows.get(generation))
        demand("canary", generation, state)
        _demand_newer(generation, view.ledger.live)
        self._demand_gates(generation, view.ledger.live, verified)
        self._know(generation, view)
        return view.pointer

    def end_canary(self, attempt: str, reason: str = "", abandon: bool = False) -> Moved:
        """Let the live generation answer every request again; an abandoned canary needs another verification."""
        view = self.view()
        running = view.ledger.canary
        if earlier(view.history, "end_canary", attempt, None) is not None:
            return Moved(_followed(view), changed=False)
        if running is None:
            raise Conflict("no generation is being tried out")
        return self._end_canary(running, view, attempt=attempt, reason=reason, abandon=abandon)

    def _end_canary(
        self, running: Canary, view: View, *, attempt: str, reason: str, abandon: bool
    ) -> Moved:
        view.demand_agreement()
        live, generation = _followed(view), running.generation
        release = self.record(
            "end_canary",
            generation,
            attempt=attempt,
            reason=reason,
            previous=live.previous,
            abandoned=abandon,
            expected=view.epoch,
        )
        rows = {generation: Row(State.ABANDONED, release.at, reason)} if abandon else {}
        to = replace(live, epoch=release.epoch, attempt=attempt, canary=None)
        return self._commit(to, view, rows, "end_canary", live=False)


@contextmanager
def _files_of(generation: str) -> Iterator[None]:
    """Missing files become a Conflict that says so."""
    try:
        yield
    except UnknownGeneration as error:
        raise Conflict(
            f"the files of {generation} are gone, so it cannot be made live: {error.message}",
            generation=generation,
        ) from error


def _demand_newer(generation: str, live: str | None) -> None:
    if live is not None and generation[:CUT_CHARS] < live[:CUT_CHARS]:
        raise Conflict(
            f"{generation} is older than {live}, which is live; going back is a roll back, not a publish",
            generation=generation,
            live=live,
        )


def _followed(view: View) -> Pointer:
    if view.pointer is None:
        raise Conflict("Redis has lost its pointer: run `python -m precompute restore` first")
    return view.pointer
