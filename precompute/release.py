"""Publish, roll back, pin, refuse, retire, restore: every change of what readers see, written down first.

The truth is the release records in the artefact store; the pointer and the registry in Redis are their projection.
An intent is written before the pointer moves and completed after, so a crash in between is settled by looking at
the pointer: it carries the attempt and the epoch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache.artefacts import ArtefactStore, check, generation_path, read_manifest, sha256_of
from cache.errors import Conflict, CorruptArtefact, UnknownGeneration
from cache.keys import Keyspace
from cache.releases import (
    Action,
    Pointer,
    Release,
    all_releases,
    done_path,
    intent_path,
    newest_move,
)
from precompute.control import Control, Row
from precompute.load import Progress, load_part, parts_of, total_bytes, unlink_pages, verify_part
from precompute.states import ALLOWED, Ledger, State, demand, fold, newest_superseded

EPOCH_TRIES = 100
CUT_CHARS = len("20260131T000000Z")
"""A generation id begins with its cut, so older data sorts first."""

# What the release records say about these outranks the registry, which may be lost or old.
_PROVEN = frozenset(
    {State.LIVE, State.SUPERSEDED, State.ROLLED_BACK, State.REFUSED, State.RETIRED, State.ABANDONED}
)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move of the pointer did; `changed` is False when the generation was live already."""

    pointer: Pointer
    changed: bool


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
        """Complete the intent whose move is proven by the pointer; the whole history, oldest first."""
        releases = all_releases(self.store)
        open_ones = [
            each
            for each in releases
            if not each.done and each.action in ("publish", "roll_back", "restore")
        ]
        newest = newest_move(releases)
        open_ones = [each for each in open_ones if newest is None or each.epoch > newest.epoch]
        pointer = self.control.pointer() if open_ones else None
        if pointer is None:
            return releases
        for release in open_ones:
            if release.epoch == pointer.epoch and release.attempt == pointer.attempt:
                self.store.write_once(done_path(release.epoch), b"")
        return all_releases(self.store)

    def state(self, generation: str, ledger: Ledger | None = None) -> State | None:
        """Where a generation stands: proven by releases, else as the registry says."""
        proven = (ledger or self.ledger()).state(generation)
        row = self.control.rows().get(generation)
        if proven in _PROVEN or row is None:
            # A refused or rolled-back generation that was loaded again stays what it is until it is verified.
            return proven
        return row.state

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
        manifest = self.store.local(generation_path(generation, "manifest.json"))
        digest = sha256_of(manifest) if manifest.is_file() else ""
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

    def publish(self, generation: str, *, attempt: str) -> Moved:
        """Make a verified generation live; a repeat of the same publish changes nothing."""
        ledger = self.ledger()
        pointer = self.control.pointer()
        if pointer is not None and pointer.generation == generation:
            return Moved(pointer, changed=False)
        demand("publish", generation, self.state(generation, ledger))
        if ledger.live is not None and generation[:CUT_CHARS] < ledger.live[:CUT_CHARS]:
            raise Conflict(
                f"{generation} is older than {ledger.live}, which is live; going back is a roll back, not a publish",
                generation=generation,
                live=ledger.live,
            )
        return self._move("publish", generation, ledger, attempt=attempt)

    def roll_back(self, *, to: str | None, reason: str, attempt: str) -> Moved:
        """Make an earlier generation live again; the one rolled back can never return without re-verification."""
        ledger = self.ledger()
        pointer = self.control.pointer()
        if pointer is not None and pointer.attempt == attempt:
            return Moved(pointer, changed=False)
        target = to or ledger.previous
        if target is None:
            raise Conflict("there is no earlier generation to roll back to")
        if pointer is not None and pointer.generation == target:
            return Moved(pointer, changed=False)
        demand("roll_back", target, ledger.state(target))
        return self._move("roll_back", target, ledger, attempt=attempt, reason=reason)

    def _move(
        self, action: Action, generation: str, ledger: Ledger, *, attempt: str, reason: str = ""
    ) -> Moved:
        pointer = self.control.pointer()
        if pointer is None and ledger.live is not None:
            raise Conflict("Redis has lost its pointer: run `python -m precompute restore` first")
        if pointer is not None and pointer.epoch < ledger.live_epoch:
            raise Conflict(
                "Redis holds an older pointer than the releases: run `python -m precompute restore` first"
            )
        states, superseded_at = dict(ledger.states or {}), dict(ledger.superseded_at or {})
        now = self.clock()
        rows = {generation: Row(State.LIVE, now)}
        if ledger.live is not None and ledger.live != generation:
            left = State.ROLLED_BACK if action == "roll_back" else State.SUPERSEDED
            states[ledger.live], superseded_at[ledger.live] = left, now
            rows[ledger.live] = Row(left, now, reason)
        previous = newest_superseded(states, superseded_at, without=[generation])
        expected_epoch = pointer.epoch if pointer else 0
        release = self.record(
            action,
            generation,
            attempt=attempt,
            reason=reason,
            previous=previous,
            after=expected_epoch,
        )
        to = Pointer(generation, release.epoch, previous, attempt, published_at=now)
        moved = self.control.move(to, expected_epoch=expected_epoch, rows=rows)
        if moved is None:
            raise Conflict(
                f"another publisher moved the pointer before {generation} could be made live"
            )
        self.store.write_once(done_path(moved.epoch), b"")
        return Moved(moved, changed=True)

    def refuse(self, generation: str, *, reason: str, attempt: str) -> None:
        """Write down that a generation must not go live."""
        self.record("refuse", generation, attempt=attempt, reason=reason)
        self.control.set_row(generation, Row(State.REFUSED, self.clock(), reason))

    def mark_verified(self, generation: str, *, attempt: str) -> None:
        """A passed verification; recorded as a release when it lifts an earlier refusal or rollback."""
        ledger = self.ledger()
        if ledger.state(generation) in (State.REFUSED, State.ROLLED_BACK, State.ABANDONED):
            self.record("verify", generation, attempt=attempt, reason="verified again")
        self.control.set_row(generation, Row(State.VERIFIED, self.clock()))

    def pin(self, generation: str, *, reason: str, expires_at: float | None, attempt: str) -> None:
        """Keep a generation from being retired."""
        if self.store.read(generation_path(generation, "manifest.json")) is None:
            raise UnknownGeneration(
                f"generation {generation} is not in {self.store.url}", generation=generation
            )
        self.record("pin", generation, attempt=attempt, reason=reason, expires_at=expires_at)

    def unpin(self, generation: str, *, attempt: str) -> None:
        """Lift a pin."""
        self.record("unpin", generation, attempt=attempt)


def reload(
    control: Control,
    keys: Keyspace,
    store: ArtefactStore,
    generation: str,
    *,
    chunk_bytes: int,
    progress: Progress = lambda _bytes: None,
) -> int:
    """Stream a generation's pages into Redis again and read them back; bytes of pages."""
    manifest = read_manifest(store, generation)
    for artefact in manifest.pages():
        store.fetch(generation_path(generation, artefact.path))
    root = store.local(generation_path(generation))
    for part in parts_of(manifest):
        check(root, part.pages.file)
        check(root, part.pages.sums)
        try:
            load_part(
                control.client,
                keys,
                manifest,
                root,
                part,
                chunk_bytes=chunk_bytes,
                progress=progress,
            )
            verify_part(control.client, keys, manifest, root, part, chunk_bytes=chunk_bytes)
        except CorruptArtefact:
            # The mark survived, the pages did not: load for real.
            control.client.hdel(keys.loaded(generation), part.name)
            load_part(control.client, keys, manifest, root, part, chunk_bytes=chunk_bytes)
            verify_part(control.client, keys, manifest, root, part, chunk_bytes=chunk_bytes)
    return total_bytes(manifest)


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
    """
    ledger, control = releases.ledger(), releases.control
    if ledger.live is None:
        raise Conflict("nothing was ever published here, so there is nothing to restore")
    control.check_policy()
    wanted = [ledger.live]
    if ledger.previous is not None:
        wanted.append(ledger.previous)
    present = [
        each
        for each in wanted
        if releases.store.read(generation_path(each, "manifest.json")) is not None
    ]
    if ledger.live not in present:
        raise Conflict(
            f"the files of {ledger.live} are gone from {releases.store.url}: run a night"
        )
    states = ledger.states or {}
    superseded_at = ledger.superseded_at or {}
    # Rows first: no page may belong to a generation that the registry does not know.
    for generation, state in states.items():
        control.set_row(
            generation, Row(state, superseded_at.get(generation, releases.clock()), "restored")
        )
    loaded_bytes = sum(
        reload(control, keys, releases.store, each, chunk_bytes=chunk_bytes, progress=progress)
        for each in present
    )
    pointer = control.pointer()
    if (
        pointer is not None
        and pointer.epoch >= ledger.live_epoch
        and pointer.generation == ledger.live
    ):
        return pointer, present, loaded_bytes
    previous = present[1] if len(present) > 1 else None
    expected_epoch = pointer.epoch if pointer else 0
    release = releases.record(
        "restore",
        ledger.live,
        attempt=attempt,
        reason="Redis was lost",
        previous=previous,
        after=expected_epoch,
    )
    to = Pointer(ledger.live, release.epoch, previous, attempt, published_at=releases.clock())
    moved = control.move(
        to, expected_epoch=expected_epoch, rows={ledger.live: Row(State.LIVE, releases.clock())}
    )
    if moved is None:
        raise Conflict(
            "another process moved the pointer while Redis was being restored; look at `status`"
        )
    releases.store.write_once(done_path(moved.epoch), b"")
    return moved, present, loaded_bytes


def sweepable(releases: Releases, *, keep: int, grace_s: float) -> list[str]:
    """Generations that nobody needs: not live, previous, pinned, held by a replica, or superseded just now.

    The newest `keep` superseded ones stay for rollbacks.
    """
    ledger, now = releases.ledger(), releases.clock()
    held = {
        each
        for replica in releases.control.replicas(now)
        for each in (*replica.holds, replica.serving)
    }
    states, left_at = ledger.states or {}, ledger.superseded_at or {}
    superseded = [each for each, state in states.items() if state is State.SUPERSEDED]
    superseded.sort(key=lambda each: left_at.get(each, 0.0), reverse=True)
    protected = {ledger.live, ledger.previous, *superseded[:keep], *held}
    found = []
    for generation in releases.store.names("generations"):
        if generation in protected or ledger.is_pinned(generation, now):
            continue
        if now - left_at.get(generation, 0.0) < grace_s:
            continue
        if releases.state(generation, ledger) in ALLOWED["retire"]:
            found.append(generation)
    return found


def retire(releases: Releases, keys: Keyspace, generation: str, *, attempt: str) -> int:
    """Remove a generation's pages, then its files; Redis keys removed. Safe to repeat after a crash.

    Written down first: from then on no rollback can land on what is being removed.
    """
    ledger = releases.ledger()
    demand("retire", generation, releases.state(generation, ledger))
    if ledger.state(generation) is not State.RETIRED:
        releases.record("retire", generation, attempt=attempt)
    releases.control.set_row(generation, Row(State.RETIRED, releases.clock()))
    removed = 0
    if releases.store.read(generation_path(generation, "manifest.json")) is not None:
        removed = unlink_pages(
            releases.control.client, keys, read_manifest(releases.store, generation)
        )
    releases.store.delete(generation_path(generation))
    return removed


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
