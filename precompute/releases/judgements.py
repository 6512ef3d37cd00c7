"""Refuse, verify, override, pin: what is said of a generation without moving the pointer, written down."""

from typing import Literal

from cache.errors import Conflict, UnknownGeneration
from cache.store.artefacts import generation_path
from cache.store.releases import Action
from precompute.config.validation import demand_reason
from precompute.control.rows import RegistryRow
from precompute.control.states import UNFINISHED, State, demand
from precompute.releases.release_log import LOOK_TRIES, ReleaseLog, ReleaseView


class Judgements(ReleaseLog):
    """The history of one namespace and the entries that judge a generation or hold it."""

    def override(self, generation: str, *, rule: str, reason: str, attempt: str) -> None:
        """Write down why a gate's failure is to be let pass by the generation's next verification.

        Raises ConfigError without a reason, Conflict for a generation that is published, retired or unknown.
        """
        reason = demand_reason("an override", reason)
        demand("override", generation, self.view().state(generation))
        self.record("override", generation, attempt=attempt, reason=reason, rule=rule)

    def _write_state(
        self, generation: str, state: State, reason: str = "", *, action: Action | None = None
    ) -> ReleaseView:
        for _ in range(LOOK_TRIES):
            view = self.view()
            if view.ledger.live == generation:
                raise Conflict(f"{generation} is live: roll it back instead", generation=generation)
            if action is not None:
                demand(action, generation, view.state(generation))
            rows = {generation: RegistryRow(state, self.clock(), reason)}
            # A refused one must not be what the pointer names as previous: answers would fall back to it.
            unless: Literal["live", "previous"] = "previous" if action == "refuse" else "live"
            if self.control.write_rows(rows, expected_epoch=view.epoch, unless=unless):
                return view
        raise Conflict("the pointer moved each time it was looked at; try again")

    def refuse(self, generation: str, *, reason: str, attempt: str) -> None:
        """Write down that a generation must not go live; raises Conflict when readers depend on it already."""
        # The row first: from here on no publisher that looked earlier can move the pointer to it.
        self._write_state(generation, State.REFUSED, reason, action="refuse")
        self.record("refuse", generation, attempt=attempt, reason=reason)
        # A Redis that lost the row meanwhile may have let such a publisher pass: say so, or write it again.
        row = self.control.rows().get(generation)
        if row is None or row.state in (*UNFINISHED, State.LIVE):
            self._write_state(generation, State.REFUSED, reason)

    def mark_verified(self, generation: str, *, attempt: str) -> None:
        """A passed verification; recorded as a release when it lifts an earlier refusal or rollback."""
        view = self.view()
        state, canary = view.ledger.state(generation), view.ledger.canary
        is_tried_out = canary is not None and canary.generation == generation
        if is_tried_out or state in (State.LIVE, State.SUPERSEDED):
            # Published by another run meanwhile: only its manifest, with the new verdicts, is another one.
            self.record("verify", generation, attempt=attempt, reason="verified once more")
            return
        ledger = self._write_state(generation, State.VERIFIED).ledger
        if ledger.state(generation) in (State.REFUSED, State.ROLLED_BACK, State.ABANDONED):
            self.record("verify", generation, attempt=attempt, reason="verified again")

    def pin(self, generation: str, *, reason: str, expires_at: float | None, attempt: str) -> None:
        """Keep a generation from being retired."""
        if self.store.read(generation_path(generation, "manifest.json")) is None:
            raise UnknownGeneration(
                f"generation {generation} is not in {self.store.url}", generation=generation
            )
        earlier_pins = self.ledger().pinned
        self.record("pin", generation, attempt=attempt, reason=reason, expires_at=expires_at)
        # A retirement marks first and looks for pins after; here it is the other way round, so one sees the other.
        row = self.control.rows().get(generation)
        if row is not None and row.state is State.RETIRED:
            if generation in earlier_pins:
                # The earlier pin holds: a retirement that sees it takes its mark back.
                self.record(
                    "pin", generation, attempt=attempt, reason=reason, expires_at=earlier_pins[generation]
                )  # fmt: skip
            else:
                self.record("unpin", generation, attempt=attempt)
            raise Conflict(f"{generation} is being retired", generation=generation)

    def unpin(self, generation: str, *, attempt: str) -> None:
        """Lift a pin."""
        self.record("unpin", generation, attempt=attempt)
