"""Restore: Redis lost what it held, the releases say what that was."""

from cache.errors import Conflict, CorruptArtefact, UnknownGeneration
from cache.keys import Keyspace
from cache.releases import Pointer, done_path
from precompute.control import Row
from precompute.load import Progress
from precompute.release_log import LOOK_TRIES, ReleaseLog, View
from precompute.reload import reload
from precompute.states import State


def restore(
    releases: ReleaseLog,
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


def _restorable(releases: ReleaseLog, view: View) -> list[str]:
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


def _point(releases: ReleaseLog, view: View, present: list[str], *, attempt: str) -> Pointer | None:
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
