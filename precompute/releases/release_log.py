"""Release log: one namespace's history of moves, verdicts and pins; every entry is written before it takes effect.

The release records in the artefact store are authoritative; the pointer and the registry in Redis are derived from
them. An intent is written before the pointer moves and completed afterwards. After a crash in between, the pointer,
which carries attempt and epoch, shows whether the move was made.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import TRANSITIONS, UNFINISHED_STATES, GenerationState, Ledger, demand_allowed, fold_releases
from cache.control.store_problems import pointer_problem, unexplained_pointer_message
from cache.errors import ConfigError, Conflict, UnknownGeneration
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import (
    POINTER_ACTIONS,
    Action,
    Pointer,
    Release,
    all_releases,
    done_path,
    intent_path,
    manifest_digest,
)
from precompute.config.settings import NightConfig

EPOCH_TRIES = 100
NOTE_TRIES = 10
LOOK_TRIES = 5
"""Attempts to read state that other programs change at the same time."""

# States for which the release records outrank the registry, which may be lost or outdated.
_PROVEN_STATES = frozenset(
    {
        GenerationState.LIVE,
        GenerationState.SUPERSEDED,
        GenerationState.ROLLED_BACK,
        GenerationState.REFUSED,
        GenerationState.RETIRED,
        GenerationState.ABANDONED,
    }
)

# States that a row may have before, or without, a record; a row with another state is from an older Redis.
_STATES_AHEAD_OF_RECORDS = UNFINISHED_STATES | {GenerationState.REFUSED}


@dataclass(frozen=True, slots=True)
class ReleaseView:
    """Consistent pointer, registry and history: the pointer did not move while they were read."""

    pointer: Pointer | None
    registry_rows: dict[str, RegistryRow]
    history: list[Release]
    ledger: Ledger

    @property
    def epoch(self) -> int:
        """The pointer's epoch, 0 without a pointer."""
        return self.pointer.epoch if self.pointer else 0

    def state(self, generation: str) -> GenerationState | None:
        """Return the state of a generation by the ledger and the registry: see `generation_state`."""
        return generation_state(generation, self.ledger, self.registry_rows.get(generation))

    def demand_agreement(self) -> None:
        """Raise Conflict unless Redis' pointer is the one that the releases prove."""
        if self.pointer is None and self.ledger.live_generation is not None:
            raise Conflict("Redis has lost its pointer: run `larder restore` first")
        if self.epoch < self.ledger.live_epoch:
            raise Conflict("Redis holds an older pointer than the releases: run `larder restore` first")
        if self.pointer is not None and self.epoch > self.ledger.live_epoch:
            raise Conflict(unexplained_pointer_message(self.pointer))


class Releases:
    """The release history of one namespace; all entries are written through this class.

    Times are those of Redis' clock by default, since publishers and sweepers run on hosts whose clocks may differ.
    """

    def __init__(self, store: ArtefactStore, control: Control, clock: Callable[[], float] | None = None) -> None:
        self.store = store
        self.control = control
        self.clock = clock or control.time
        self._release_by_number: dict[int, Release] = {}

    def history(self) -> list[Release]:
        """Return every record, oldest first, with settled and unsettled moves."""
        return all_releases(self.store, self._release_by_number, should_pack=True)

    def settle(self) -> list[Release]:
        """Complete the intent whose move the pointer proves; return the whole history, oldest first.

        No pointer is replaced before its own intent is completed (`demand_agreement`), so no move is lost.
        """
        releases = self.history()
        open_intents = [release for release in releases if not release.is_done and release.action in POINTER_ACTIONS]
        pointer = self.control.read_pointer() if open_intents else None
        if pointer is None:
            return releases
        for release in open_intents:
            if release.epoch == pointer.epoch and release.attempt == pointer.attempt:
                self.store.write_once(done_path(release.stored_number), b"")
                return self.history()
        return releases

    def ledger(self) -> Ledger:
        """Return the ledger of the settled history."""
        return fold_releases(self.settle())

    def view(self) -> ReleaseView:
        """Return pointer, registry and settled history of one moment; raise Conflict if the pointer keeps moving."""
        for _ in range(LOOK_TRIES):
            # The pointer is read first: its intent was written earlier, so the history includes it.
            pointer = self.control.read_pointer()
            history, rows = self.settle(), self.control.rows()
            if self.control.read_pointer() == pointer:
                return ReleaseView(pointer, rows, history, without_retired(fold_releases(history), rows))
        raise Conflict("the pointer moved during each of several reads; try again")

    def state(self, generation: str, ledger: Ledger | None = None) -> GenerationState | None:
        """Return the state of a generation: as proven by releases, else as in the registry."""
        return generation_state(generation, ledger or self.ledger(), self.control.rows().get(generation))

    def demand_agreement(self) -> None:
        """Raise Conflict, naming key, store and remedy, unless Redis' pointer is the one that the releases prove."""
        view = self.view()
        problem = pointer_problem(view.pointer, view.history, self.store, self.control.keyspace.live)
        if problem is not None:
            raise Conflict(problem)
        view.demand_agreement()

    def record(
        self,
        action: Action,
        generation: str,
        *,
        attempt: str,
        reason: str = "",
        previous_generation: str | None = None,
        expires_at: float | None = None,
        canary_percent: float | None = None,
        rule: str = "",
        is_abandoned: bool = False,
        page_count_by_table: Mapping[str, int] | None = None,
        expected_epoch: int | None = None,
    ) -> Release:
        """Write one entry with the next number, and an epoch above every earlier one and above `expected_epoch`.

        The number is the file's name, which only one writer gets, so a delayed writer's entry comes after all entries
        written since.
        """
        raw_manifest = self._raw_manifest(generation)
        digest = "" if raw_manifest is None else manifest_digest(raw_manifest)
        for _ in range(EPOCH_TRIES):
            newest_release = next(reversed(self.history()), None)
            newest_epoch, newest_number = (
                (newest_release.epoch, newest_release.stored_number) if newest_release is not None else (0, 0)
            )
            recorded_at = self.clock()
            release = Release(
                number=newest_number + 1,
                epoch=max(newest_epoch + 1, (expected_epoch or 0) + 1, int(recorded_at * 1000)),
                action=action,
                generation=generation,
                previous=previous_generation,
                attempt=attempt,
                at=recorded_at,
                reason=reason,
                manifest_sha256=digest,
                expires_at=expires_at,
                percent=canary_percent,
                rule=rule,
                abandoned=is_abandoned,
                pages=page_count_by_table,
                expected=expected_epoch,
            )
            if self.store.write_once(intent_path(release.number), release.to_bytes()):
                return release
        raise Conflict(f"{EPOCH_TRIES} other releases were being written at the same time; try again")

    def complete(self, epoch: int) -> None:
        """Record that the pointer moved by the intent of this epoch."""
        for release in self.history():
            if release.epoch == epoch:
                self.store.write_once(done_path(release.stored_number), b"")

    def note(self, generation: str, state: Literal[GenerationState.BEGUN, GenerationState.LOADED]) -> None:
        """Record a step of the night in the registry; raise Conflict if the generation was retired meanwhile.

        A later state, or one that a gate or an operator set, stays unchanged.
        """
        state_after_step = TRANSITIONS["begin" if state is GenerationState.BEGUN else "load"]
        for _ in range(NOTE_TRIES):
            view = self.view()
            current_state = view.state(generation)
            if current_state is GenerationState.RETIRED:
                raise Conflict(f"{generation} was retired while it was being made", generation=generation)
            rows = {generation: RegistryRow(state_after_step.get(current_state, state), self.clock())}
            if current_state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
                return
            if self.control.write_rows(rows, expected_epoch=view.epoch, unless_named_as="live"):
                row = self.control.rows().get(generation)
                if row is not None and row.state is GenerationState.RETIRED:
                    continue
                return
        raise Conflict(f"the pointer moved {NOTE_TRIES} times while {generation}'s state was written; try again")

    def override(self, generation: str, *, rule: str, reason: str, attempt: str) -> None:
        """Record the reason why a gate's failure does not count in the generation's next verification.

        Raises ConfigError without a reason, Conflict for a generation that is published, retired or unknown.
        """
        reason = demand_reason("an override", reason)
        demand_allowed("override", generation, self.view().state(generation))
        self.record("override", generation, attempt=attempt, reason=reason, rule=rule)

    def mark_verified(self, generation: str, *, attempt: str) -> None:
        """Record a passed verification, as a release if it lifts an earlier refusal, roll back or abandonment."""
        view = self.view()
        state, canary = view.ledger.state(generation), view.ledger.canary
        is_tried_out = canary is not None and canary.generation == generation
        if is_tried_out or state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            # Another run published it meanwhile: the state stays, and the record has the new manifest's digest.
            self.record("verify", generation, attempt=attempt, reason="verified once more")
            return
        ledger = self._write_state(generation, GenerationState.VERIFIED).ledger
        if ledger.state(generation) in (
            GenerationState.REFUSED,
            GenerationState.ROLLED_BACK,
            GenerationState.ABANDONED,
        ):
            self.record("verify", generation, attempt=attempt, reason="verified again")

    def pin(self, generation: str, *, reason: str, expires_at: float | None, attempt: str) -> None:
        """Keep a generation from being retired; raise Conflict if it is being retired."""
        if self.store.read(generation_path(generation, "manifest.json")) is None:
            raise UnknownGeneration(f"generation {generation} is not in {self.store.url}", generation=generation)
        earlier_pins = self.ledger().pin_expiry_by_generation
        self.record("pin", generation, attempt=attempt, reason=reason, expires_at=expires_at)
        # A retirement marks the row, then looks for pins; a pin is recorded, then the row is read: so one sees the
        # other.
        row = self.control.rows().get(generation)
        if row is not None and row.state is GenerationState.RETIRED:
            if generation in earlier_pins:
                # The earlier pin still holds: a retirement that sees it removes its mark.
                self.record(
                    "pin", generation, attempt=attempt, reason=reason, expires_at=earlier_pins[generation]
                )  # fmt: skip
            else:
                self.record("unpin", generation, attempt=attempt)
            raise Conflict(f"{generation} is being retired", generation=generation)

    def unpin(self, generation: str, *, attempt: str) -> None:
        """Remove a pin."""
        self.record("unpin", generation, attempt=attempt)

    def record_refusal(self, generation: str, *, reason: str, attempt: str) -> None:
        """Record that a generation must not go live; raise Conflict if readers already depend on it."""
        # The row is written first: then no publisher that checked earlier can move the pointer to the generation.
        self._write_state(generation, GenerationState.REFUSED, reason, action="refuse")
        self.record("refuse", generation, attempt=attempt, reason=reason)
        # If Redis lost the row meanwhile, such a publisher may have succeeded (then this raises), or the row is
        # rewritten.
        row = self.control.rows().get(generation)
        if row is None or row.state in (*UNFINISHED_STATES, GenerationState.LIVE):
            self._write_state(generation, GenerationState.REFUSED, reason)

    def _write_state(
        self, generation: str, state: GenerationState, reason: str = "", *, action: Action | None = None
    ) -> ReleaseView:
        for _ in range(LOOK_TRIES):
            view = self.view()
            if view.ledger.live_generation == generation:
                raise Conflict(f"{generation} is live: roll it back instead", generation=generation)
            if action is not None:
                demand_allowed(action, generation, view.state(generation))
            rows = {generation: RegistryRow(state, self.clock(), reason)}
            # A refused generation must not be the pointer's previous one, since answers would fall back to it.
            unless: Literal["live", "previous"] = "previous" if action == "refuse" else "live"
            if self.control.write_rows(rows, expected_epoch=view.epoch, unless_named_as=unless):
                return view
        raise Conflict("the pointer moved during each of several reads; try again")

    def _raw_manifest(self, generation: str) -> bytes | None:
        return self.store.read(generation_path(generation, "manifest.json"))


@contextmanager
def open_releases(config: NightConfig) -> Iterator[Releases]:
    """Yield the release history for the duration of a step, over its own connection."""
    with connect(config.redis_url, config.redis_timeout_s, namespace=config.namespace) as client:
        yield Releases(config.store(), Control(client, config.keyspace()))


def ledger_and_rows_after_move(
    view: ReleaseView, action: Action, generation: str, *, attempt: str, moved_at: float, reason: str = ""
) -> tuple[Ledger, dict[str, RegistryRow]]:
    """Return the ledger after a move at the time `moved_at`, and the registry rows that the move changes."""
    epoch = max(view.epoch, view.ledger.epoch) + 1
    done_release = Release(epoch, action, generation, None, attempt, moved_at, is_done=True)
    ledger_after = without_retired(fold_releases([*view.history, done_release]), view.registry_rows)
    rows = {
        generation_id: RegistryRow(state, moved_at, "" if generation_id == generation else reason)
        for generation_id, state in ledger_after.state_by_generation.items()
        if generation_id == generation or state is not view.ledger.state(generation_id)
    }
    return ledger_after, rows


def without_retired(ledger: Ledger, rows: Mapping[str, RegistryRow]) -> Ledger:
    """Return the ledger with generations whose row is marked as retired in that state, except the live one.

    A retirement marks the row before it writes its record; from then on no pointer may move to the generation.
    """
    retired_ids = {generation_id for generation_id, row in rows.items() if row.state is GenerationState.RETIRED} - {
        ledger.live_generation
    }
    states = {
        generation_id: GenerationState.RETIRED if generation_id in retired_ids else state
        for generation_id, state in ledger.state_by_generation.items()
    }
    return replace(ledger, state_by_generation=states)


def generation_state(generation: str, ledger: Ledger, row: RegistryRow | None) -> GenerationState | None:
    """Return the state of a generation: as proven by releases, else as in its row; None if neither has one."""
    proven_state = ledger.state(generation)
    if row is not None and row.state is GenerationState.RETIRED and proven_state is not GenerationState.LIVE:
        return GenerationState.RETIRED
    # A refused or rolled-back generation that was loaded again keeps its state until it is verified.
    if row is None or proven_state in _PROVEN_STATES:
        return proven_state
    return row.state if proven_state is None or row.state in _STATES_AHEAD_OF_RECORDS else proven_state


def demand_reason(action: str, reason: str | None) -> str:
    """Return the stripped reason; raise ConfigError if it is empty."""
    if not (reason or "").strip():
        raise ConfigError(f"{action} needs a reason (--reason): it is kept in the record", field="reason")
    return str(reason).strip()
