"""Canaries: a verified generation tried out beside the live one, under moves of the pointer that make nothing live."""

from dataclasses import replace

from cache.errors import ConfigError, Conflict
from cache.store.releases import Canary, Pointer
from precompute.bulk.governor import Governor
from precompute.bulk.reload import load_missing
from precompute.control.rows import RegistryRow
from precompute.control.states import State, demand
from precompute.releases.attempts import earlier
from precompute.releases.moves import MoveResult, Moves, Report, files_of
from precompute.releases.release_log import LOOK_TRIES, ReleaseView


class Canaries(Moves):
    """Starts and ends the one canary that a namespace may have."""

    def start_canary(
        self,
        generation: str,
        percent: float,
        attempt: str,
        *,
        verified: Report | None = None,
        event: str = "",
        governor: Governor | None = None,
    ) -> MoveResult:
        """Let a verified generation answer `percent` of the requests beside the live one; again: change its share.

        `verified`: see `prepare`.

        Raises Conflict when nothing is live, another canary runs, or the generation could not be published.
        """
        if not 0 < percent <= 100:
            raise ConfigError(f"a canary's share is above 0 and at most 100 %, not {percent}")
        view = self.view()
        if earlier(view.history, "canary", attempt, generation, percent) is not None:
            return MoveResult(_followed(view), has_moved=False)
        live = self._demand_canary(generation, view, verified)
        if view.ledger.canary is not None and view.ledger.canary.percent == percent:
            return MoveResult(live, has_moved=False)
        with files_of(generation):
            load_missing(self.control, self.store, generation, governor=governor)
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

    def _demand_canary(
        self, generation: str, view: ReleaseView, verified: Report | None
    ) -> Pointer:
        view.demand_agreement()
        running = view.ledger.canary
        if running is not None and running.generation != generation:
            raise Conflict(
                f"{running.generation} is being tried out: end that canary first",
                generation=running.generation,
            )
        if view.pointer is None:
            raise Conflict("nothing is live that a canary could be compared with: publish it")
        demand("canary", generation, view.state(generation))
        self._demand_newer(generation, view.ledger.live)
        self._demand_gates(generation, view.ledger.live, verified)
        self._demand_readers(generation)
        self._know(generation, view)
        return view.pointer

    def end_canary(self, attempt: str, reason: str = "", abandon: bool = False) -> MoveResult:
        """Let the live generation answer every request again; an abandoned canary needs another verification."""
        view = self.view()
        running = view.ledger.canary
        if earlier(view.history, "end_canary", attempt, None) is not None:
            return MoveResult(_followed(view), has_moved=False)
        if running is None:
            raise Conflict("no generation is being tried out")
        return self._end_canary(running, view, attempt=attempt, reason=reason, abandon=abandon)

    def _end_canary(
        self, running: Canary, view: ReleaseView, *, attempt: str, reason: str, abandon: bool
    ) -> MoveResult:
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
        rows = {generation: RegistryRow(State.ABANDONED, release.at, reason)} if abandon else {}
        to = replace(live, epoch=release.epoch, attempt=attempt, canary=None)
        return self._commit(to, view, rows, "end_canary", live=False)

    def refuse(self, generation: str, *, reason: str, attempt: str) -> None:
        """Refuses as any refusal does; a canary ends first, so that no request is answered from it any more."""
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


def _followed(view: ReleaseView) -> Pointer:
    if view.pointer is None:
        raise Conflict("Redis has lost its pointer: run `larder restore` first")
    return view.pointer
