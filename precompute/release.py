"""Publish, roll back, pin, refuse, retire, restore: every change of what readers see, written down first.

The truth is the release records in the artefact store; the pointer and the registry in Redis are their projection.
An intent is written before the pointer moves and completed after, so a crash in between is settled by looking at
the pointer: it carries the attempt and the epoch.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cache.artefacts import ArtefactStore, generation_path, read_manifest
from cache.errors import Conflict, CorruptArtefact, UnknownGeneration
from cache.keys import Keyspace
from cache.manifest import GENERATION
from cache.releases import (
    MOVES,
    Action,
    Pointer,
    Release,
    all_releases,
    done_path,
    intent_path,
    released_manifest,
)
from precompute.control import Control, Row
from precompute.load import Progress, unlink_pages
from precompute.reload import load_missing, reload
from precompute.states import (
    ALLOWED,
    UNFINISHED,
    Ledger,
    State,
    demand,
    fold,
    newest_superseded,
)

EPOCH_TRIES = 100
NOTE_TRIES = 10
LOOK_TRIES = 5
"""How often something is looked at again when it changed underneath."""

CUT_CHARS = len("20260131T000000Z")
"""A generation id begins with its cut, so older data sorts first."""

ABANDON_AFTER_S = 86_400.0

# What the release records say about these outranks the registry, which may be lost or old.
_PROVEN = frozenset(
    {State.LIVE, State.SUPERSEDED, State.ROLLED_BACK, State.REFUSED, State.RETIRED, State.ABANDONED}
)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move of the pointer did; `changed` is False when this attempt, or another, had done it already."""

    pointer: Pointer
    changed: bool


@dataclass(frozen=True, slots=True)
class View:
    """Pointer, registry and history that belong together: the pointer did not move while they were read."""

    pointer: Pointer | None
    rows: dict[str, Row]
    history: list[Release]
    ledger: Ledger

    @property
    def epoch(self) -> int:
        """The pointer's epoch, 0 when there is none."""
        return self.pointer.epoch if self.pointer else 0

    def demand_agreement(self) -> None:
        """Raises Conflict unless Redis follows exactly what the releases say is live."""
        if self.pointer is None and self.ledger.live is not None:
            raise Conflict("Redis has lost its pointer: run `python -m precompute restore` first")
        if self.epoch < self.ledger.live_epoch:
            raise Conflict(
                "Redis holds an older pointer than the releases: run `python -m precompute restore` first"
            )
        if self.epoch > self.ledger.live_epoch:
            raise Conflict(
                f"Redis holds a pointer of epoch {self.epoch} that no release record explains; is this its "
                "artefact store?"
            )


class Releases:
    """The release history of one namespace and the one way to add to it."""

    def __init__(
        self, store: ArtefactStore, control: Control, clock: Callable[[], float] = time.time
    ) -> None:
        self.store = store
        self.control = control
        self.clock = clock

    def ledger(self) -> Ledger:
        """The settled history."""
        return fold(self.settle())

    def settle(self) -> list[Release]:
        """Complete the intent whose move is proven by the pointer; the whole history, oldest first.

        No pointer is replaced before its own intent is completed (`demand_agreement`), so none is ever forgotten.
        """
        releases = all_releases(self.store)
        open_ones = [each for each in releases if not each.done and each.action in MOVES]
        pointer = self.control.pointer() if open_ones else None
        if pointer is None:
            return releases
        for release in open_ones:
            if release.epoch == pointer.epoch and release.attempt == pointer.attempt:
                self.store.write_once(done_path(release.epoch), b"")
                return all_releases(self.store)
        return releases

    def view(self) -> View:
        """Pointer and settled history of one moment; raises Conflict when the pointer never rests."""
        for _ in range(LOOK_TRIES):
            # The pointer first: its intent was written before it, so the history read after it knows it.
            pointer = self.control.pointer()
            history, rows = self.settle(), self.control.rows()
            if self.control.pointer() == pointer:
                return View(pointer, rows, history, _without_retired(fold(history), rows))
        raise Conflict("the pointer moved each time it was looked at; try again")

    def state(self, generation: str, ledger: Ledger | None = None) -> State | None:
        """Where a generation stands: proven by releases, else as the registry says."""
        return _state(generation, ledger or self.ledger(), self.control.rows().get(generation))

    def record(
        self,
        action: Action,
        generation: str,
        *,
        attempt: str,
        reason: str = "",
        previous: str | None = None,
        expires_at: float | None = None,
        after: int = 0,
    ) -> Release:
        """Write one entry under the next epoch, which is greater than every earlier one."""
        digest = self._manifest_digest(generation)
        for _ in range(EPOCH_TRIES):
            newest = max((release.epoch for release in all_releases(self.store)), default=0)
            epoch = max(newest + 1, after + 1, int(self.clock() * 1000))
            release = Release(
                epoch=epoch,
                action=action,
                generation=generation,
                previous=previous,
                attempt=attempt,
                at=self.clock(),
                reason=reason,
                manifest_sha256=digest,
                expires_at=expires_at,
            )
            if self.store.write_once(intent_path(epoch), release.to_bytes()):
                return release
        raise Conflict(
            f"{EPOCH_TRIES} other releases were being written at the same time; try again"
        )

    def note(self, generation: str, state: State) -> None:
        """Write a step of the night into the registry; Conflict when the generation was retired meanwhile."""
        for _ in range(NOTE_TRIES):
            view = self.view()
            epoch = view.pointer.epoch if view.pointer else 0
            if self.control.mark({generation: Row(state, self.clock())}, expected_epoch=epoch):
                row = self.control.rows().get(generation)
                if row is not None and row.state is State.RETIRED:
                    raise Conflict(
                        f"{generation} was retired while it was being made", generation=generation
                    )
                return
        raise Conflict(
            f"the pointer moved {NOTE_TRIES} times while {generation} was being noted; try again"
        )

    def prepare(self, generation: str, *, attempt: str) -> Moved | None:
        """Stream what Redis misses of a generation to be published; what happened if it was published already."""
        view = self.view()
        if (done := _earlier(view.history, "publish", attempt, generation)) is not None:
            return Moved(done, changed=False)
        if (live := self._demand_publish(generation, view)) is not None:
            return Moved(live, changed=False)
        with _files_of(generation):
            load_missing(self.control, self.control.keys, self.store, generation)
        return None

    def publish(self, generation: str, *, attempt: str) -> Moved:
        """Make a verified generation live; a repeat of the same publish changes nothing."""
        if (moved := self.prepare(generation, attempt=attempt)) is not None:
            return moved
        view = self.view()
        if (live := self._demand_publish(generation, view)) is not None:
            return Moved(live, changed=False)
        return self._move("publish", generation, view, attempt=attempt)

    def _demand_publish(self, generation: str, view: View) -> Pointer | None:
        if view.pointer is not None and view.pointer.generation == generation:
            return view.pointer
        view.demand_agreement()
        ledger = view.ledger
        demand("publish", generation, _state(generation, ledger, view.rows.get(generation)))
        if ledger.live is not None and generation[:CUT_CHARS] < ledger.live[:CUT_CHARS]:
            raise Conflict(
                f"{generation} is older than {ledger.live}, which is live; going back is a roll back, not a publish",
                generation=generation,
                live=ledger.live,
            )
        # No page may belong to a generation that the registry does not know.
        self._know(generation, view)
        return None

    def roll_back(self, *, to: str | None, reason: str, attempt: str) -> Moved:
        """Make an earlier generation live again; the one rolled back can never return without re-verification."""
        view = self.view()
        if (done := _earlier(view.history, "roll_back", attempt, to)) is not None:
            return Moved(done, changed=False)
        target = to or view.ledger.previous
        if target is None:
            raise Conflict("there is no earlier generation to roll back to")
        if (live := self._demand_roll_back(target, view)) is not None:
            return Moved(live, changed=False)
        bad = view.ledger.live
        with _files_of(target):
            self.check_manifest(target, view.history)
            reload(self.control, self.control.keys, self.store, target)
        view = self.view()
        if view.ledger.live != bad:
            raise Conflict(
                f"{view.ledger.live} became live while {target} was being checked; is it to be rolled back as well?"
            )
        if (live := self._demand_roll_back(target, view)) is not None:
            return Moved(live, changed=False)
        return self._move("roll_back", target, view, attempt=attempt, reason=reason)

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
        ledger = view.ledger
        states, superseded_at = dict(ledger.states or {}), dict(ledger.superseded_at or {})
        now = self.clock()
        rows = {generation: Row(State.LIVE, now)}
        if ledger.live is not None and ledger.live != generation:
            left = State.ROLLED_BACK if action == "roll_back" else State.SUPERSEDED
            states[ledger.live], superseded_at[ledger.live] = left, now
            rows[ledger.live] = Row(left, now, reason)
        previous = newest_superseded(states, superseded_at, without=[generation])
        release = self.record(
            action,
            generation,
            attempt=attempt,
            reason=reason,
            previous=previous,
            after=view.epoch,
        )
        to = Pointer(generation, release.epoch, previous, attempt, published_at=now)
        try:
            moved = self.control.move(
                to, expected_epoch=view.epoch, rows=rows, allowed=ALLOWED[action]
            )
        except Conflict as error:
            if error.details.get("state") == State.RETIRED:
                # Pages loaded for this move while a retirement removed them: nobody else would remove them.
                unlink_pages(self.control.client, self.control.keys, manifest)
            raise
        if moved is None:
            raise Conflict(
                f"another publisher moved the pointer before {generation} could be made live"
            )
        self.store.write_once(done_path(moved.epoch), b"")
        return Moved(moved, changed=True)

    def check_manifest(self, generation: str, history: list[Release]) -> None:
        """Raises CorruptArtefact when the manifest is not the one that was released, UnknownGeneration if gone."""
        found = self._manifest_digest(generation)
        if not found:
            raise UnknownGeneration(
                f"generation {generation} has no manifest in {self.store.url}",
                generation=generation,
            )
        released = released_manifest(history, generation)
        if released and found != released:
            raise CorruptArtefact(
                f"the manifest of {generation} has SHA-256 {found}, its release record says {released}",
                generation=generation,
            )

    def _manifest_digest(self, generation: str) -> str:
        raw = self.store.read(generation_path(generation, "manifest.json"))
        return "" if raw is None else hashlib.sha256(raw).hexdigest()

    def _mark(self, generation: str, state: State, reason: str = "") -> View:
        for _ in range(LOOK_TRIES):
            view = self.view()
            if view.ledger.live == generation:
                raise Conflict(f"{generation} is live: roll it back instead", generation=generation)
            rows = {generation: Row(state, self.clock(), reason)}
            if self.control.mark(rows, expected_epoch=view.epoch, unless="live"):
                return view
        raise Conflict("the pointer moved each time it was looked at; try again")

    def refuse(self, generation: str, *, reason: str, attempt: str) -> None:
        """Write down that a generation must not go live; raises Conflict when it is live already."""
        # The row first: from here on no publisher that looked earlier can move the pointer to it.
        self._mark(generation, State.REFUSED, reason)
        self.record("refuse", generation, attempt=attempt, reason=reason)

    def mark_verified(self, generation: str, *, attempt: str) -> None:
        """A passed verification; recorded as a release when it lifts an earlier refusal or rollback."""
        ledger = self.view().ledger
        if ledger.state(generation) in (State.LIVE, State.SUPERSEDED):
            # Published by another run meanwhile: only its manifest, with the new verdicts, is another one.
            self.record("verify", generation, attempt=attempt, reason="verified once more")
            return
        ledger = self._mark(generation, State.VERIFIED).ledger
        if ledger.state(generation) in (State.REFUSED, State.ROLLED_BACK, State.ABANDONED):
            self.record("verify", generation, attempt=attempt, reason="verified again")

    def pin(self, generation: str, *, reason: str, expires_at: float | None, attempt: str) -> None:
        """Keep a generation from being retired."""
        if self.store.read(generation_path(generation, "manifest.json")) is None:
            raise UnknownGeneration(
                f"generation {generation} is not in {self.store.url}", generation=generation
            )
        self.record("pin", generation, attempt=attempt, reason=reason, expires_at=expires_at)
        # A retirement marks first and looks for pins after; here it is the other way round, so one sees the other.
        row = self.control.rows().get(generation)
        if row is not None and row.state is State.RETIRED:
            self.record("unpin", generation, attempt=attempt)
            raise Conflict(f"{generation} is being retired", generation=generation)

    def unpin(self, generation: str, *, attempt: str) -> None:
        """Lift a pin."""
        self.record("unpin", generation, attempt=attempt)


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


def _without_retired(ledger: Ledger, rows: dict[str, Row]) -> Ledger:
    # A retirement marks its row before it is written down; from then on nothing may land on it.
    gone = {each for each, row in rows.items() if row.state is State.RETIRED} - {ledger.live}
    states = {
        each: State.RETIRED if each in gone else state
        for each, state in (ledger.states or {}).items()
    }
    return replace(ledger, states=states)


def _state(generation: str, ledger: Ledger, row: Row | None) -> State | None:
    proven = ledger.state(generation)
    if row is not None and row.state is State.RETIRED and proven is not State.LIVE:
        return State.RETIRED
    # A refused or rolled-back generation that was loaded again stays what it is until it is verified.
    return proven if proven in _PROVEN or row is None else row.state


def _earlier(
    history: list[Release], action: Action, attempt: str, generation: str | None
) -> Pointer | None:
    """The pointer that this very attempt made, however far it has moved on since.

    A verification since then asks for a new publish: an operator who clears a whole run keeps its name.
    """
    verified: set[str] = set()
    for each in reversed(history):
        if each.action == "verify":
            verified.add(each.generation)
        if each.done and each.action == action and each.attempt == attempt:
            if generation not in (None, each.generation):
                continue
            if action == "publish" and each.generation in verified:
                return None
            return Pointer(each.generation, each.epoch, each.previous, attempt, each.at)
    return None


def restore(
    releases: Releases,
    keys: Keyspace,
    *,
    attempt: str,
    chunk_bytes: int,
    progress: Progress = lambda _bytes: None,
) -> tuple[Pointer, list[str], int]:
    """Rebuild what a Redis lost: registry, pages of live and previous, pointer under a new epoch.

    Returns the pointer, the generations loaded and their bytes. Raises Conflict when nothing was ever published.
    A publish or a roll back that comes in while pages stream is never undone: it starts over from what is live then.
    """
    control = releases.control
    for _ in range(LOOK_TRIES):
        view = releases.view()
        ledger = view.ledger
        if ledger.live is None:
            raise Conflict("nothing was ever published here, so there is nothing to restore")
        if view.epoch > ledger.live_epoch:
            view.demand_agreement()
        control.check_policy()
        present = _restorable(releases, view)
        states, left_at = ledger.states or {}, ledger.superseded_at or {}
        # Rows first: no page may belong to a generation that the registry does not know.
        rows = {
            each: Row(state, left_at.get(each, releases.clock()), "restored")
            for each, state in states.items()
        }
        if not control.mark(rows, expected_epoch=view.epoch):
            continue
        loaded_bytes = sum(
            reload(control, keys, releases.store, each, chunk_bytes=chunk_bytes, progress=progress)
            for each in present
        )
        now = releases.view()
        if (now.pointer, now.ledger.live_epoch, now.ledger.states) != (
            view.pointer,
            ledger.live_epoch,
            ledger.states,
        ):
            continue
        if view.pointer is not None and view.epoch == ledger.live_epoch:
            return view.pointer, present, loaded_bytes
        moved = _point(releases, view, present, attempt=attempt)
        if moved is not None:
            return moved, present, loaded_bytes
    raise Conflict(
        f"releases were made {LOOK_TRIES} times while Redis was being restored; look at `status`"
    )


def _restorable(releases: Releases, view: View) -> list[str]:
    """The live generation, then the previous one if its files are what was released."""
    live, previous = str(view.ledger.live), view.ledger.previous
    try:
        releases.check_manifest(live, view.history)
    except UnknownGeneration as error:
        raise Conflict(
            f"the files of {live} are gone from {releases.store.url}: run a night"
        ) from error
    if previous is None:
        return [live]
    try:
        releases.check_manifest(previous, view.history)
    except (UnknownGeneration, CorruptArtefact):
        return [live]  # what only a rollback would need must not keep readers waiting
    return [live, previous]


def _point(releases: Releases, view: View, present: list[str], *, attempt: str) -> Pointer | None:
    live, previous = present[0], present[1] if len(present) > 1 else None
    release = releases.record(
        "restore",
        live,
        attempt=attempt,
        reason="Redis was lost",
        previous=previous,
        after=view.epoch,
    )
    to = Pointer(live, release.epoch, previous, attempt, published_at=releases.clock())
    rows = {live: Row(State.LIVE, releases.clock())}
    moved = releases.control.move(to, expected_epoch=view.epoch, rows=rows)
    if moved is not None:
        releases.store.write_once(done_path(moved.epoch), b"")
    return moved


def sweepable(
    releases: Releases,
    *,
    keep: int,
    grace_s: float,
    abandon_after_s: float = ABANDON_AFTER_S,
) -> list[str]:
    """Generations that nobody needs: not live, previous, pinned, held by a replica, or superseded just now.

    The newest `keep` superseded ones stay for rollbacks. Unfinished ones go once they are older than the live one
    and nobody has touched them for `abandon_after_s`.
    """
    view, now = releases.view(), releases.clock()
    ledger = view.ledger
    states, left_at = ledger.states or {}, ledger.superseded_at or {}
    superseded = [each for each, state in states.items() if state is State.SUPERSEDED]
    superseded.sort(key=lambda each: left_at.get(each, 0.0), reverse=True)
    protected = {ledger.live, ledger.previous, *superseded[:keep], *_held(releases)}
    if view.pointer is not None:
        protected |= {view.pointer.generation, view.pointer.previous}
    stored = {each for each in releases.store.names("generations") if GENERATION.fullmatch(each)}
    # A row without files is all that is left of a night that broke at once; a retired one waits for its overlays.
    known = {each for each, row in view.rows.items() if row.state is not State.RETIRED}
    found = []
    for generation in sorted(stored | known):
        if generation in protected or ledger.is_pinned(generation, now):
            continue
        if now - left_at.get(generation, 0.0) < grace_s:
            continue
        state = _state(generation, ledger, view.rows.get(generation))
        if state in ALLOWED["retire"] or _is_abandoned(releases, view, generation, abandon_after_s):
            found.append(generation)
    return found


def _held(releases: Releases) -> Collection[str | None]:
    replicas = releases.control.replicas(releases.clock())
    return {each for replica in replicas for each in (*replica.holds, replica.serving)}


def _is_abandoned(releases: Releases, view: View, generation: str, after_s: float) -> bool:
    row, live = view.rows.get(generation), view.ledger.live
    if _state(generation, view.ledger, row) not in (None, *UNFINISHED):
        return False
    if live is None or generation[:CUT_CHARS] >= live[:CUT_CHARS]:
        return False  # it can still be published
    if row is not None:
        return releases.clock() - row.at > after_s
    try:
        touched_at = float(read_manifest(releases.store, generation).created_at)
    except UnknownGeneration:
        # Nothing says how old it is, so its age counts from now.
        releases.control.mark(
            {generation: Row(State.BEGUN, releases.clock())}, expected_epoch=view.epoch
        )
        return False
    return releases.clock() - touched_at > after_s


def retire(
    releases: Releases,
    keys: Keyspace,
    generation: str,
    *,
    attempt: str,
    abandon_after_s: float = ABANDON_AFTER_S,
) -> int:
    """Remove a generation's pages, then its files; Redis keys removed. Safe to repeat after a crash.

    Marked and written down first: from then on no rollback can land on what is being removed.
    """
    _mark_retired(releases, generation, attempt=attempt, abandon_after_s=abandon_after_s)
    removed = 0
    if releases.store.read(generation_path(generation, "manifest.json")) is not None:
        removed = unlink_pages(
            releases.control.client, keys, read_manifest(releases.store, generation)
        )
    releases.store.delete(generation_path(generation))
    return removed


def _mark_retired(
    releases: Releases, generation: str, *, attempt: str, abandon_after_s: float
) -> None:
    for _ in range(LOOK_TRIES):
        view = releases.view()
        view.demand_agreement()
        former = view.rows.get(generation)
        state = _state(generation, view.ledger, former)
        abandoned = _is_abandoned(releases, view, generation, abandon_after_s)
        if not abandoned:
            demand("retire", generation, state)
        recorded = fold(view.history).state(generation)
        if recorded is not State.RETIRED:
            _demand_unneeded(releases, generation, view.ledger)
        rows = {generation: Row(State.RETIRED, releases.clock())}
        if releases.control.mark(rows, expected_epoch=view.epoch, unless="previous"):
            break
    else:
        raise Conflict("the pointer moved each time it was looked at; try again")
    if recorded is State.RETIRED:
        return
    try:
        # A pin or a reader may have come between the look and the mark; none can come after it.
        _demand_unneeded(releases, generation, releases.ledger())
    except Conflict:
        if former is None:
            releases.control.drop_row(generation)
        else:
            releases.control.set_row(generation, former)
        raise
    if abandoned:
        demand("abandon", generation, state)
        releases.record("abandon", generation, attempt=attempt, reason="never finished")
    releases.record("retire", generation, attempt=attempt)


def _demand_unneeded(releases: Releases, generation: str, ledger: Ledger) -> None:
    if ledger.is_pinned(generation, releases.clock()):
        raise Conflict(f"cannot retire {generation}: it is pinned", generation=generation)
    if generation in _held(releases):
        raise Conflict(f"cannot retire {generation}: a replica holds it", generation=generation)


def drop_old_rows(releases: Releases, *, overlay_ttl_s: float) -> int:
    """Forget retired generations once the last overlay of them must have expired; rows dropped."""
    now = releases.clock()
    rows = releases.control.rows()
    old = [
        each
        for each, row in rows.items()
        if row.state is State.RETIRED and now - row.at > overlay_ttl_s
    ]
    for generation in old:
        releases.control.drop_row(generation)
    return len(old)
