"""Publish and roll back: the moves that make a generation live, written down first."""

from cache.errors import Conflict
from cache.store.artefacts import read_manifest
from cache.store.releases import Action, Pointer
from precompute.bulk.governor import Governor
from precompute.bulk.load import unlink_pages
from precompute.bulk.reload import load_missing, repair
from precompute.control.states import State, demand
from precompute.releases.attempts import earlier
from precompute.releases.canaries import Canaries
from precompute.releases.moves import MoveResult, Report, files_of
from precompute.releases.release_log import ReleaseView


class Releases(Canaries):
    """The release history of one namespace and the moves that add to it."""

    def prepare(
        self,
        generation: str,
        *,
        attempt: str,
        verified: Report | None = None,
        governor: Governor | None = None,
    ) -> MoveResult | None:
        """Stream what Redis misses of a generation to be published; what happened if it was published already.

        With verify's report (`verified`), Conflict when something else is live than what it was compared with.
        """
        view = self.view()
        if (earlier_pointer := earlier(view.history, "publish", attempt, generation)) is not None:
            return MoveResult(earlier_pointer, has_moved=False)
        if (live := self._demand_publish(generation, view, verified)) is not None:
            return MoveResult(live, has_moved=False)
        with files_of(generation):
            load_missing(self.control, self.store, generation, governor=governor)
        return None

    def publish(
        self,
        generation: str,
        *,
        attempt: str,
        verified: Report | None = None,
        governor: Governor | None = None,
    ) -> MoveResult:
        """Make a verified generation live; a repeat of the same publish changes nothing. `verified`: see `prepare`."""
        moved = self.prepare(generation, attempt=attempt, verified=verified, governor=governor)
        if moved is not None:
            return moved
        view = self.view()
        if (live := self._demand_publish(generation, view, verified)) is not None:
            return MoveResult(live, has_moved=False)
        return self._move("publish", generation, view, attempt=attempt, governor=governor)

    def _demand_publish(
        self, generation: str, view: ReleaseView, verified: Report | None
    ) -> Pointer | None:
        if view.pointer is not None and view.pointer.generation == generation:
            return view.pointer
        view.demand_agreement()
        demand("publish", generation, view.state(generation))
        self._demand_newer(generation, view.ledger.live)
        self._demand_gates(generation, view.ledger.live, verified)
        self._demand_readers(generation)
        # No page may belong to a generation that the registry does not know.
        self._know(generation, view)
        return None

    def roll_back(self, *, to: str | None, reason: str, attempt: str) -> MoveResult:
        """Make an earlier generation live again; the one rolled back can never return without re-verification.

        Before the move only its marks and the lengths of a sample of its pages are looked at, so readers see it within
        a second however large it is; `mend` is to be called after it.
        """
        view = self.view()
        if (earlier_pointer := earlier(view.history, "roll_back", attempt, to)) is not None:
            return MoveResult(earlier_pointer, has_moved=False)
        target = to or view.ledger.previous
        if target is None:
            raise Conflict("there is no earlier generation to roll back to")
        if (live := self._demand_roll_back(target, view)) is not None:
            return MoveResult(live, has_moved=False)
        rolled_back_id = view.ledger.live
        with files_of(target):
            self.check_manifest(target, view.history)
            load_missing(self.control, self.store, target, is_urgent=True)
        view = self.view()
        if view.ledger.live != rolled_back_id:
            raise Conflict(
                f"{view.ledger.live} became live while {target} was being checked; is it to be rolled back as well?"
            )
        if (live := self._demand_roll_back(target, view)) is not None:
            return MoveResult(live, has_moved=False)
        return self._move("roll_back", target, view, attempt=attempt, reason=reason)

    def mend(self, generation: str, *, governor: Governor | None = None) -> list[str]:
        """Read the pages of the live generation back and repair what is damaged; the keys of the pages repaired.

        Does nothing for a generation that is not live by now.
        """
        if (pointer := self.control.pointer()) is None or pointer.generation != generation:
            return []
        return repair(self.control, self.store, generation, governor=governor)

    def _demand_roll_back(self, target: str, view: ReleaseView) -> Pointer | None:
        if view.pointer is not None and view.pointer.generation == target:
            return view.pointer
        view.demand_agreement()
        demand("roll_back", target, view.ledger.state(target))
        self._demand_readers(target)
        self._know(target, view)
        return None

    def _move(
        self,
        action: Action,
        generation: str,
        view: ReleaseView,
        *,
        attempt: str,
        reason: str = "",
        governor: Governor | None = None,
    ) -> MoveResult:
        with files_of(generation):
            manifest = read_manifest(self.store, generation)
        after, rows = self.outcome(action, generation, view, attempt=attempt, reason=reason)
        previous, published_at = after.previous, self.clock()
        release = self.record(
            action,
            generation,
            attempt=attempt,
            reason=reason,
            previous=previous,
            expected=view.epoch,
        )
        to = Pointer(generation, release.epoch, previous, attempt, published_at=published_at)
        try:
            return self._commit(to, view, rows, action)
        except Conflict as error:
            if error.details.get("state") == State.RETIRED:
                # Pages loaded for this move while a retirement removed them: nobody else would remove them.
                unlink_pages(self.control.client, self.control.keys, manifest, governor=governor)
            raise
