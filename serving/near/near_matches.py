"""Near matches of the configured tables, for the generations that a replica holds."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from threading import Lock
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from cache.config.near import NearConfig
from cache.model.input_preparation import LiveInput
from cache.model.predictor import Predictor, PreparedInput
from serving.generations.snapshot import Snapshot
from serving.near.list_matches import Candidates, ListMatches
from serving.near.neighbours import NearOutcome, Neighbours
from serving.near.reuse_policy import ReusePolicy
from serving.near.value_matches import ValueMatches

log = logging.getLogger(__name__)

InputKind = Literal["history", "features", "both"]
Matches = ListMatches | ValueMatches


class NearInput(NamedTuple):
    """Input ready for its model; `kind` is None where only an answer of its own will do."""

    prepared: PreparedInput
    fingerprint: int
    kind: InputKind | None


class NearRecord(NamedTuple):
    """A live record, and how near the input was whose answer it reuses; None where it was computed."""

    record: bytes
    distance: float | None = None


class NearMatches:
    """Near matches by generation, table and kind of input; any thread may call it.

    What was learned lives as long as the generation's models: an answer is never reused in another one.
    """

    def __init__(self, configured: Mapping[str, NearConfig], rng: Random | None = None) -> None:
        self.counts: dict[str, Counter[NearOutcome]] = {name: Counter() for name in configured}
        self._configured = configured
        self._rng = rng or Random()
        self._matches: WeakKeyDictionary[Predictor, dict[tuple[str, InputKind], Matches]] = (
            WeakKeyDictionary()
        )
        self._policies: dict[tuple[str, InputKind], ReusePolicy] = {}
        self._lock = Lock()

    def check(self, snapshot: Snapshot) -> None:
        """Warns of each configured table of which nothing can be reused in this generation."""
        for name in self._configured:
            if (reason := refusal(snapshot, name)) is not None:
                log.warning(
                    "[serving.near.%s] reuses nothing in generation %s: %s",
                    name,
                    snapshot.generation,
                    reason,
                )

    def covers(self, snapshot: Snapshot, table: str) -> bool:
        """True if answers of the table may be reused."""
        return table in self._configured and refusal(snapshot, table) is None

    def predict(
        self, snapshot: Snapshot, table: str, inputs: Sequence[NearInput], scored_at: int
    ) -> list[NearRecord]:
        """A record for each input; raises what the model raises."""
        predictor = snapshot.predictor
        if predictor is None:
            raise ValueError("a snapshot without a model predicts nothing")
        records: list[NearRecord] = [NearRecord(b"")] * len(inputs)
        for kind in {near_input.kind for near_input in inputs}:
            rows = [row for row, near_input in enumerate(inputs) if near_input.kind == kind]
            batch = [inputs[row].prepared for row in rows]
            prints = [inputs[row].fingerprint for row in rows]
            matches = None if kind is None else self._of(predictor, snapshot, table, kind)
            blocked = snapshot.blocked_ordinals
            if matches is None or matches.neighbours.policy.is_off:
                batch_records = predictor.predict(table, batch, prints, scored_at, blocked=blocked)
                near: list[float | None] = [None] * len(batch_records)
            else:
                # Not the version of the list: an arm obeys that of another namespace as well.
                stamp = snapshot.blocked_stamp
                batch_records, near = matches.predict(
                    predictor, batch, prints, scored_at, blocked, stamp
                )
            for row, record, distance in zip(rows, batch_records, near, strict=True):
                records[row] = NearRecord(record, distance)
        return records

    def policies(self) -> Iterator[tuple[str, InputKind, ReusePolicy]]:
        """Policy of each table and kind of input, in the generation that was asked last."""
        with self._lock:  # a scrape comes while the model's threads meet a new kind
            sorted_policies = sorted(
                self._policies.items(), key=lambda keyed_policy: keyed_policy[0]
            )
        for (table, kind), policy in sorted_policies:
            yield table, kind, policy

    def _of(self, predictor: Predictor, snapshot: Snapshot, table: str, kind: InputKind) -> Matches:
        with self._lock:
            matches_by_key = self._matches.setdefault(predictor, {})
            matches = matches_by_key.get((table, kind))
            if matches is None:
                matches = matches_by_key[table, kind] = self._build_matches(
                    predictor, snapshot, table
                )
            self._policies[table, kind] = matches.neighbours.policy
            return matches

    def _build_matches(self, predictor: Predictor, snapshot: Snapshot, table: str) -> Matches:
        config, counts = self._configured[table], self.counts[table]
        layout = snapshot.manifest.tables[table].layout
        if layout.kind == "topk":
            dims = predictor.output_dims(table)
            reach = predictor.search(table).reach()
            of_lists: Neighbours[Candidates] = Neighbours(
                config.error, config.entries, dims, self._rng, counts
            )
            return ListMatches(table, layout.width, config.overlap, reach, of_lists)
        dims = predictor.sent_dims(table)
        return ValueMatches(
            table, Neighbours(config.error, config.entries, dims, self._rng, counts)
        )


def kind_of(source: LiveInput) -> InputKind | None:
    """Kind of an input: what was sent of history and features; None for an item of the catalogue, its own input."""
    if source.item is not None or not (source.history or source.features):
        return None
    if source.history and source.features:
        return "both"
    return "history" if source.history else "features"


def refusal(snapshot: Snapshot, table: str) -> str | None:
    """Reason why nothing of the table can be reused in this generation; None if something can."""
    manifest_table = snapshot.manifest.tables.get(table)
    if manifest_table is None:
        return f"there is no such table; known are {', '.join(sorted(snapshot.manifest.tables))}"
    predictor = snapshot.predictor
    if predictor is None or not predictor.supports(table):
        return "no model computes its answers"
    if manifest_table.kind == "vector":
        return "its answer is the vector itself: behind its model there is nothing to spare"
    if manifest_table.kind == "value" and not predictor.takes_numbers_alone(table):
        return "its model takes more than float32 features, by which inputs could be compared"
    if manifest_table.kind == "value" and manifest_table.layout.width < 2:
        return "it has a single value, and no first label that could differ"
    return None
