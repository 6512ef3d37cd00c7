"""Entity on its way down the ladder: what is wanted, from what it could be computed, what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.events.new_items import NO_NEW_ITEMS, NewItems
from cache.filters.masks import Passing
from cache.format.ids import FeatureValue, fingerprint, hash_id, input_digest
from cache.format.manifest import Table
from cache.format.records.codec import Record, decode
from cache.model.predictor import LiveInput
from cache.tiers.results import Found, Missed, MissReason, Outcome, Want
from serving.admission.work_pacer import YieldPacer
from serving.answers.sources import Source
from serving.fresh.newer_events import CountedEvents
from serving.generations.snapshot import Snapshot
from serving.rendering.answer_fields import Answer, History, Prediction, history_in
from serving.requests.errors import Problem, from_input
from serving.requests.models import Ask, RequestedEntity, RequestOptions

_NO_OTHER_NIGHT = (MissReason.ENTITY_BLOCKED, MissReason.EXHAUSTED)
"""Reasons that hold for the previous generation as well."""
_NO_ITEMS = np.empty(0, np.int64)


class Partial(NamedTuple):
    """Part of a list that passes a filter, where that is less than was asked for, and where the list came from."""

    prediction: Prediction
    snapshot: Snapshot
    source: Source
    producer: str
    passing: Passing
    told: Mapping[str, bool]
    """Fields that are true of the list."""
    had: frozenset[int] = frozenset()
    """Ordinals of what the user had, where the list is of another generation than the live one."""


@dataclass(slots=True, eq=False)
class Case:
    """Case of one entity: `reason` says why there is no plain hit, `live_reason` why live had an input and no answer.

    `dropped` counts the ids of the history that the model lacked, where live has counted them. `near` is the distance
    of the input whose answer live reused; where `is_exact`, none will do. `counted` are newer events of the user, which
    the answer counts; once `is_settled`, by leaving their items out of a list that was computed without them.
    `new_items` are those that an answer computed now may name.
    """

    entity: RequestedEntity
    table: Table
    k: int
    want: Want
    digest: bytes
    reason: str | None = None
    live_reason: str | None = None
    found: Found | None = None
    answer: Answer | None = None
    dropped: int | None = None
    partial: Partial | None = None
    near: float | None = None
    is_exact: bool = False
    counted: CountedEvents | None = None
    is_settled: bool = False
    new_items: NewItems = NO_NEW_ITEMS
    _history: tuple[str, History] | None = None
    _stored: Want | None = None

    def take(self, outcome: Outcome) -> None:
        """Takes over how a read of the tiers ended."""
        if isinstance(outcome, Missed):
            self.reason = outcome.reason
        else:
            self.found = outcome

    def count(self, counted_events: CountedEvents, *, is_settled: bool) -> None:
        """Takes newer events into account: what is stored of a user with them lies beside, under their digest.

        A list that the night made under a filter is left out, too: what passes is looked for in the user's own.
        """
        self.counted, self.is_settled, self.is_exact = counted_events, is_settled, True
        self.reason = self.found = None
        if not is_settled:
            self._lie_under(counted_events.digest)

    def answer_with(self, new_items: NewItems) -> None:
        """Takes new items into account: what is computed of an input lies under a digest that names them, too."""
        self.new_items, self.is_exact = new_items, True
        if new_items and self.entity.has_input and self.want.position < 0:
            self.reason = self.found = None
            self._lie_under(xxhash.xxh3_128_digest(self.digest + new_items.digest))

    def _lie_under(self, digest: bytes) -> None:
        self._stored, self.digest = self.of_the_night._replace(table=self.table), digest
        self.want = Want(self.table, digest, fingerprint(digest), -1, digest)

    def settle(self) -> bool:
        """Wants what the night stored from now on, where nothing can be had that counts newer events or new items.

        Returns whether there may be such a thing, which was not asked for before.
        """
        if self._stored is None:
            return False
        self.want, self._stored, self.is_settled = self._stored, None, True
        return self.want.position >= 0 or self.counted is None

    @property
    def names_new_items(self) -> bool:
        """True if the record read for it is not the one the night stored: where there are new items, it has them."""
        return self._stored is not None

    @property
    def of_the_night(self) -> Want:
        """Read request for what the night stored, whatever is wanted in its place."""
        return self._stored or self.want

    @property
    def position(self) -> int:
        """Position of the entity in its directory; -1 where the night did not know it."""
        return self.want.position if self.counted is None else self.counted.input.position

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of the input while it waits for the model."""
        if self.counted is not None:
            return 256 + 128 * self.counted.events
        history, features = self.entity.history or (), self.entity.features or {}
        named = [
            128 + len(name) + _feature_bytes(feature_value)
            for name, feature_value in features.items()
        ]
        return 256 + 49 * len(history) + sum(map(len, history)) + sum(named)

    @property
    def own_ordinal(self) -> int | None:
        """Ordinal of an item of the catalogue, its own input: its model index stands in the item table; else None."""
        if self.table.entity == "item" and self.want.position >= 0:
            return self.want.position
        return None

    @property
    def source(self) -> LiveInput:
        """Input of live inference: history, features if there are any, and own ordinal."""
        return LiveInput(self.entity.history, self.entity.features or None, self.own_ordinal)

    @property
    def is_cold(self) -> bool:
        """True if the night did not know the id, though it may be served."""
        return (
            self.position < 0
            and self.entity.raw is not None
            and self.reason != MissReason.ENTITY_BLOCKED
        )

    @property
    def may_reuse(self) -> bool:
        """True if the answer to an input close by will do: never for an id that the night knows."""
        return self.want.position < 0 and not self.is_exact

    def may_compute(self, snapshot: Snapshot) -> bool:
        """True if it is not blocked, has an input and its table a producer; the model itself may still be down."""
        if self.reason == MissReason.ENTITY_BLOCKED:
            return False
        if self.counted is not None and not self.is_settled:
            return True
        is_computed_by_night = self.position >= 0 and self.reason != MissReason.NOT_IN_GENERATION
        if self.counted is not None and is_computed_by_night:
            return False
        if not self.entity.has_input and self.own_ordinal is None:
            return False
        return snapshot.predictor is None or snapshot.predictor.supports(self.table.name)

    def decoded(self, snapshot: Snapshot, stored_record: bytes) -> Record:
        """A record of this generation; raises CorruptArtefact."""
        return decode(self.table.layout, stored_record, snapshot.numbered)

    def had_by_night(self, live: Snapshot) -> NDArray[np.int64]:
        """Ordinals in the live generation of the items that its night knows the user to have had.

        None where the generation does not keep them (it has neither attributes of items nor events), and none of a
        user who is blocked or was erased: the answer is then made without anything that is known of the user.
        """
        if self.reason == MissReason.ENTITY_BLOCKED:
            return _NO_ITEMS
        return live.had_by_night(self.table, self.position)

    def is_answered_by_night(self, record: Record) -> bool:
        """True if a record is the list that the night, or the night with newer events, has for this user.

        Then it is the answer however few of its items are left. The list of an item, its own input, may go on.
        """
        if self.position < 0 or self.table.entity != "user":
            return False
        if not record.live:
            return True
        counted_events = None if self.is_settled else self.counted
        return counted_events is not None and counted_events.input.sent is None

    def history_in(self, snapshot: Snapshot) -> History:
        """The sent history as this generation knows it, looked up once."""
        if self._history is None or self._history[0] != snapshot.generation:
            self._history = snapshot.generation, history_in(snapshot, self.entity.history)
        return self._history[1]


def _feature_bytes(value: FeatureValue) -> int:
    if isinstance(value, str):
        return 4 * len(value)  # the widest that Python keeps a character
    if not isinstance(value, tuple):
        return 32
    if value and isinstance(value[0], str):
        return sum(64 + 4 * len(str(text)) for text in value)
    return 40 * len(value)


async def cases_of(snapshot: Snapshot, request: Ask) -> list[Case]:
    """Builds a case per entity; raises Problem for what this generation can never answer."""
    cases = []
    pace = YieldPacer()
    for entity in request.entities:
        await pace.step(entity)
        table = snapshot.table(entity.table)
        k = _checked_k(table, request.options.k)
        if entity.features:
            _check_features(snapshot, table, entity)
        digest = _digest(snapshot, entity)
        record_key = made_under_filter(
            snapshot, _want(snapshot, table, entity, digest), request.options
        )
        cases.append(Case(entity, table, k, record_key, digest))
    return cases


def made_under_filter(snapshot: Snapshot, record_key: Want, options: RequestOptions) -> Want:
    """Read request for the list that the night made under the filter that is called, where it made one.

    Not for another order, whose candidates are those of the list that is asked: then a name would mean another answer
    than its expression. Nor where events have changed an attribute that it compares: what passes now was not looked at.
    """
    if not isinstance(options.filter, str) or options.rerank is not None or record_key.position < 0:
        return record_key
    if snapshot.filtering is None or snapshot.filtering.differs(options.filter):
        return record_key
    declared = snapshot.manifest.filters.get(options.filter)
    table = None if declared is None else declared.tables.get(record_key.table.name)
    return record_key if table is None else record_key._replace(table=table)


def plain_case(
    snapshot: Snapshot, table: Table, k: int, record_key: Want, entity: RequestedEntity
) -> Case:
    """The case of an entity that came with nothing but an id, which was looked up as `record_key`."""
    digest = record_key.digest or snapshot.digest_of_nothing
    return Case(entity, table, k, record_key, digest)


def plain_want(snapshot: Snapshot, table: Table, raw: bytes) -> Want:
    """Read request for an id that came without an input, with the digest of an item, which is its own input."""
    record_key = want_in(snapshot, table, raw)
    is_input = table.entity == "item" and record_key.position >= 0
    return record_key._replace(digest=snapshot.digest_of_nothing) if is_input else record_key


def want_in(snapshot: Snapshot, table: Table, raw: bytes, digest: bytes | None = None) -> Want:
    """Read request (`Want`) for an id, with the digest of its input if it came with one."""
    directory = snapshot.directories[table.entity]
    key = hash_id(raw, directory.seed)
    return Want(table, key, fingerprint(raw), directory.find(key), digest)


def _digest(snapshot: Snapshot, entity: RequestedEntity) -> bytes:
    model = "" if snapshot.predictor is None else snapshot.predictor.model_digest
    return input_digest(model, entity.history or None, entity.features or None)


def _want(snapshot: Snapshot, table: Table, entity: RequestedEntity, digest: bytes) -> Want:
    if entity.raw is None:
        return Want(table, digest, fingerprint(digest), -1, digest)
    if entity.has_input:
        return want_in(snapshot, table, entity.raw, digest)
    return plain_want(snapshot, table, entity.raw)


def _checked_k(table: Table, k: int | None) -> int:
    width = table.layout.width
    if k is None or table.kind != "topk":
        return width
    if k > width:
        raise Problem(
            422, "invalid_k", f"{table.name} holds {width} items per entity, k is {k}",
            field="k", table=table.name, limit=width,
        )  # fmt: skip
    return k


def _check_features(snapshot: Snapshot, table: Table, entity: RequestedEntity) -> None:
    predictor = snapshot.predictor
    if predictor is None or not predictor.supports(table.name):
        return
    try:
        predictor.prepare(table.name, LiveInput(None, entity.features, None))
    except InvalidInput as error:
        raise from_input(error, f"{entity.field}.features") from error


def still_open(cases: Sequence[Case]) -> list[Case]:
    """Cases without an answer yet, but those of whose list too little passes a filter: no rung has more of it."""
    return [
        case for case in cases if case.answer is None and case.reason is not MissReason.FILTERED
    ]


def want_of_previous(previous: Snapshot, case: Case) -> Want | str:
    """The record that a case may be answered with from the previous generation, or why there is none."""
    raw = case.entity.raw
    if raw is None or case.reason in _NO_OTHER_NIGHT:
        return case.reason or "no_id"
    table = previous.manifest.tables.get(case.table.name)
    if table is None or (table.entity, table.kind) != (case.table.entity, case.table.kind):
        return "no_such_table"
    if table.is_facet and case.want.position < 0:  # items that had this value have another now
        return "not_in_generation"
    record_key = want_in(previous, table, raw)
    # Never an overlay: it was computed for another night.
    return record_key if record_key.position >= 0 else "not_in_generation"
