"""Pending answer of an entity on its way down the ladder: request, input, and answer or reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.ids import FeatureValue, fingerprint, hash_id, input_digest
from cache.format.manifest import Table
from cache.model.filter_mask import FilterMask
from cache.model.input_preparation import LiveInput
from cache.model.new_items import NO_ELIGIBLE_NEW_ITEMS, NO_NEW_ITEMS, EligibleNewItems, NewItems
from cache.records import Record, decode_record
from cache.tiers.reads import Hit, Miss, MissReason, ReadResult, RecordKey
from serving.admission.work_pacer import YieldPacer
from serving.engine.rendering.answer_fields import AnswerJson, Prediction, SentHistory, history_in
from serving.generations.snapshot import Snapshot
from serving.requests.answers import Source
from serving.requests.errors import Problem, problem_from_input
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.options import RequestOptions

_NO_ORDINALS = np.empty(0, np.int64)


class PartialList(NamedTuple):
    """Items of a list that pass a filter, fewer than requested, and the list's source."""

    prediction: Prediction
    snapshot: Snapshot
    source: Source
    producer: str
    filter_mask: FilterMask
    answer_flags: Mapping[str, bool]
    """Answer fields that are true for the list."""
    seen_ordinals: frozenset[int] = frozenset()
    """Ordinals of the user's past items, if the list is from another generation than the live one."""


class NewerInput(Protocol):
    """Input that is newer than the night's: newer events of a user. The hook `rewrite` creates it."""

    @property
    def event_input(self) -> object:
        """Input of live inference, as `BatchInference.compute_newer` takes it."""

    @property
    def inputs_digest(self) -> bytes:
        """Digest of all inputs of the answer."""

    @property
    def has_all_events(self) -> bool:
        """True if all events are known; else nothing is computed from them."""

    @property
    def is_as_of_earlier(self) -> bool:
        """True if an earlier position was requested: the answer is computed and not stored."""

    @property
    def is_approximate(self) -> bool:
        """True if an answer computed from this input may differ from the next night's."""

    @property
    def directory_position(self) -> int:
        """Position of the user in the directory; -1 if the night did not know them."""

    @property
    def counts_sent_input(self) -> bool:
        """True if the caller's input counts in addition to the events."""

    @property
    def event_count(self) -> int:
        """Number of events."""

    @property
    def newest_accepted_at(self) -> str:
        """Time when the newest event was accepted, RFC 3339, UTC."""

    @property
    def event_item_ids(self) -> tuple[bytes, ...]:
        """Ids of the events' items."""


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """Pending answer of one entity: `reason` is why there is no plain hit, `live_failure_reason` why live gave none.

    `unknown_id_count` is the number of ids of the history that the model lacked, if live has counted them.
    `near_distance` is the distance of the input whose answer live reused; if `forbids_near_answer`, no such answer is
    allowed. `counted_events` are newer events of the user that the answer counts. Once `is_settled_for_stored`, it
    counts them only by excluding their items from a list that was computed without them. `new_items` are the new items
    that a computed answer may name.
    """

    entity: RequestedEntity
    table: Table
    k: int
    record_key: RecordKey
    input_digest: bytes
    reason: MissReason | None = None
    live_failure_reason: str | None = None
    hit: Hit | None = None
    answer: AnswerJson | None = None
    unknown_id_count: int | None = None
    partial_list: PartialList | None = None
    near_distance: float | None = None
    forbids_near_answer: bool = False
    counted_events: NewerInput | None = None
    is_settled_for_stored: bool = False
    is_as_of_before_night: bool = False
    """True if the request's `as_of` lies before the newest event that the night counts."""
    new_items: NewItems = NO_NEW_ITEMS
    _generation_and_history: tuple[str, SentHistory] | None = None
    _nightly_key: RecordKey | None = None

    def set_read_result(self, read_result: ReadResult) -> None:
        """Set hit or reason from the outcome of a read from the tiers."""
        if isinstance(read_result, Miss):
            self.reason = read_result.reason
        else:
            self.hit = read_result

    def include_counted_events(self, counted_events: NewerInput, *, is_settled_for_stored: bool) -> None:
        """Set the newer events; an answer with them is stored separately, under their digest.

        The nightly list of a named filter is not used then: the filter is applied to the user's plain list.
        """
        self.counted_events, self.is_settled_for_stored, self.forbids_near_answer = (
            counted_events,
            is_settled_for_stored,
            True,
        )
        self.reason = self.hit = None
        if not is_settled_for_stored:
            self._use_digest(counted_events.inputs_digest)

    def include_new_items(self, new_items: NewItems) -> None:
        """Set the new items; a computed answer is then stored under a digest of input and new items."""
        self.new_items, self.forbids_near_answer = new_items, True
        if new_items and self.entity.has_input and self.record_key.directory_position < 0:
            self.reason = self.hit = None
            self._use_digest(xxhash.xxh3_128_digest(self.input_digest + new_items.digest))

    def _use_digest(self, input_digest: bytes) -> None:
        self._nightly_key, self.input_digest = self.nightly_key._replace(table=self.table), input_digest
        self.record_key = RecordKey(self.table, input_digest, fingerprint(input_digest), -1, input_digest)

    def fall_back_to_nightly(self) -> bool:
        """Use the nightly record from now on, because no answer with newer events or new items is available.

        Returns whether there may be a nightly record that has not been read yet.
        """
        if self._nightly_key is None:
            return False
        self.record_key, self._nightly_key, self.is_settled_for_stored = self._nightly_key, None, True
        return self.record_key.directory_position >= 0 or self.counted_events is None

    @property
    def may_name_new_items(self) -> bool:
        """True if the record that is read is not the nightly one, and so may name new items."""
        return self._nightly_key is not None

    @property
    def nightly_key(self) -> RecordKey:
        """Key of the nightly record, even if another record is read in its place."""
        return self._nightly_key or self.record_key

    @property
    def directory_position(self) -> int:
        """Position of the entity in its directory; -1 if the night did not know it."""
        return (
            self.record_key.directory_position
            if self.counted_events is None
            else self.counted_events.directory_position
        )

    @property
    def input_size_bytes(self) -> int:
        """Approximate bytes of the input while it waits for the model."""
        if self.counted_events is not None:
            return 256 + 128 * self.counted_events.event_count
        history, features = self.entity.history or (), self.entity.features or {}
        feature_sizes = [
            128 + len(feature_name) + _feature_size_bytes(feature_value)
            for feature_name, feature_value in features.items()
        ]
        return 256 + 49 * len(history) + sum(map(len, history)) + sum(feature_sizes)

    @property
    def own_ordinal(self) -> int | None:
        """Ordinal of a catalogue item whose own table entry is its input; None for any other entity."""
        if self.table.entity == "item" and self.record_key.directory_position >= 0:
            return self.record_key.directory_position
        return None

    @property
    def live_input(self) -> LiveInput:
        """Input of live inference: history, features if there are any, and own ordinal."""
        return LiveInput(self.entity.history, self.entity.features or None, self.own_ordinal)

    @property
    def is_cold(self) -> bool:
        """True if the night did not know the id and the id is not blocked."""
        return (
            self.directory_position < 0 and self.entity.raw_id is not None and self.reason != MissReason.ENTITY_BLOCKED
        )

    @property
    def may_reuse_near_answer(self) -> bool:
        """True if the answer to a near input may be reused; never for an id that the night knows."""
        return self.record_key.directory_position < 0 and not self.forbids_near_answer

    def may_compute_live(self, snapshot: Snapshot) -> bool:
        """True unless the entity is blocked or has no input, or its table has no producer; the model may still fail."""
        if self.reason == MissReason.ENTITY_BLOCKED:
            return False
        if self.counted_events is not None and not self.is_settled_for_stored:
            return True
        if (
            self.counted_events is not None
            and self.directory_position >= 0
            and self.reason != MissReason.NOT_IN_GENERATION
        ):  # the night computed this item
            return False
        if not self.entity.has_input and self.own_ordinal is None:
            return False
        return snapshot.predictor is None or snapshot.predictor.supports(self.table.name)

    def decode_record(self, snapshot: Snapshot, stored_record: bytes) -> Record:
        """Decode a record of this generation; raise CorruptArtefact."""
        return decode_record(self.table.layout, stored_record, snapshot.nameable_item_count)

    def find_seen_ordinals(self, live: Snapshot) -> NDArray[np.int64]:
        """Return the ordinals in the live generation of the user's past items, as the night knew them.

        Empty if the generation does not keep them (it has neither attributes of items nor events), and for a blocked or
        erased user, whose data must not be used.
        """
        if self.reason == MissReason.ENTITY_BLOCKED:
            return _NO_ORDINALS
        return live.past_item_ordinals(self.table, self.directory_position)

    def is_answered_by_night(self, record: Record) -> bool:
        """True if the record is this user's nightly list, or one computed from the night's input and newer events.

        Then it is the answer even if few of its items are left. For the list of an item lower rungs are tried.
        """
        if self.directory_position < 0 or self.table.entity != "user":
            return False
        if not record.is_live:
            return True
        counted_events = None if self.is_settled_for_stored else self.counted_events
        return counted_events is not None and not counted_events.counts_sent_input

    def history_in(self, snapshot: Snapshot) -> SentHistory:
        """Return the sent history with this generation's ordinals, looked up once."""
        if self._generation_and_history is None or self._generation_and_history[0] != snapshot.generation:
            self._generation_and_history = snapshot.generation, history_in(snapshot, self.entity.history)
        return self._generation_and_history[1]


def new_items_of(snapshot: Snapshot, pending: PendingAnswer) -> EligibleNewItems:
    """Return the new items that an answer may name, without excluded ones."""
    if not pending.new_items:
        return NO_ELIGIBLE_NEW_ITEMS
    excluded_ids = list(pending.entity.history or ())
    # A settled answer excludes the events' items later: its record is shared by all who send this input.
    if pending.counted_events is not None and not pending.is_settled_for_stored:
        excluded_ids += pending.counted_events.event_item_ids
    excluded_numbers = {
        pending.new_items.item_number_by_id.get(excluded_id, -1) for excluded_id in excluded_ids
    } | snapshot.blocked_item_numbers
    return EligibleNewItems(pending.new_items, frozenset(excluded_numbers), pending.nightly_key.fingerprint)


def _feature_size_bytes(feature_value: FeatureValue) -> int:
    if isinstance(feature_value, str):
        return 4 * len(feature_value)  # Python uses at most 4 bytes per character
    if not isinstance(feature_value, tuple):
        return 32
    if feature_value and isinstance(feature_value[0], str):
        return sum(64 + 4 * len(str(text)) for text in feature_value)
    return 40 * len(feature_value)


async def build_pending_answers(snapshot: Snapshot, request: LookupRequest) -> list[PendingAnswer]:
    """Build a pending answer per entity; raise Problem for a request that this generation can never answer."""
    pendings = []
    yield_pacer = YieldPacer()
    for entity in request.entities:
        await yield_pacer.count_entity(entity)
        table = snapshot.table(entity.table)
        k = _checked_list_length(table, request.options.k)
        if entity.features:
            _check_features(snapshot, table, entity)
        input_digest = _input_digest_of(snapshot, entity)
        record_key = with_filter_table(
            snapshot, _find_record_key(snapshot, table, entity, input_digest), request.options
        )
        pendings.append(PendingAnswer(entity, table, k, record_key, input_digest))
    return pendings


def with_filter_table(snapshot: Snapshot, record_key: RecordKey, options: RequestOptions) -> RecordKey:
    """Return the record key of the list that the night made under the named filter, if it made one.

    Not for re-ranked lists, whose candidates are those of the plain list: otherwise a filter's name would give another
    answer than its expression. Nor if events have changed an attribute that the filter compares, since the night did
    not check the new values.
    """
    if not isinstance(options.filter, str) or options.rerank is not None or record_key.directory_position < 0:
        return record_key
    if options.filter in snapshot.changed_filter_names:
        return record_key
    declared_filter = snapshot.manifest.filters.get(options.filter)
    filter_table = None if declared_filter is None else declared_filter.tables.get(record_key.table.name)
    return record_key if filter_table is None else record_key._replace(table=filter_table)


def build_plain_pending_answer(
    snapshot: Snapshot, table: Table, k: int, record_key: RecordKey, entity: RequestedEntity
) -> PendingAnswer:
    """Build the pending answer of an entity without an input, which was looked up as `record_key`."""
    input_digest = record_key.input_digest or snapshot.digest_of_nothing
    return PendingAnswer(entity, table, k, record_key, input_digest)


def find_plain_record_key(snapshot: Snapshot, table: Table, raw_id: bytes) -> RecordKey:
    """Return the record key of an id without an input, with the digest if it is an item, which is its own input."""
    record_key = find_record_key(snapshot, table, raw_id)
    is_own_input = table.entity == "item" and record_key.directory_position >= 0
    return record_key._replace(input_digest=snapshot.digest_of_nothing) if is_own_input else record_key


def find_record_key(snapshot: Snapshot, table: Table, raw_id: bytes, input_digest: bytes | None = None) -> RecordKey:
    """Return the record key of an id, with the digest of its input if there is one."""
    directory = snapshot.directories[table.entity]
    key = hash_id(raw_id, directory.seed)
    return RecordKey(table, key, fingerprint(raw_id), directory.find_position(key), input_digest)


def _input_digest_of(snapshot: Snapshot, entity: RequestedEntity) -> bytes:
    model_digest = "" if snapshot.predictor is None else snapshot.predictor.model_digest
    return input_digest(model_digest, entity.history or None, entity.features or None)


def _find_record_key(snapshot: Snapshot, table: Table, entity: RequestedEntity, input_digest: bytes) -> RecordKey:
    if entity.raw_id is None:
        return RecordKey(table, input_digest, fingerprint(input_digest), -1, input_digest)
    if entity.has_input:
        return find_record_key(snapshot, table, entity.raw_id, input_digest)
    return find_plain_record_key(snapshot, table, entity.raw_id)


def _checked_list_length(table: Table, k: int | None) -> int:
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
        raise problem_from_input(error, f"{entity.field_path}.features") from error


def unanswered_of(pendings: Sequence[PendingAnswer]) -> list[PendingAnswer]:
    """Return the pending answers without an answer, except partial lists: no rung has more passing items."""
    return [pending for pending in pendings if pending.answer is None and pending.reason is not MissReason.FILTERED]


def find_previous_record_key(previous: Snapshot, pending: PendingAnswer) -> RecordKey | str:
    """Return the record key for the previous generation, or the reason why it cannot answer."""
    entity_id = pending.entity.raw_id
    if entity_id is None:
        return pending.reason or "no_id"
    if pending.reason is not None and pending.reason.traits.holds_for_previous:
        return pending.reason
    table = previous.manifest.tables.get(pending.table.name)
    if table is None or (table.entity, table.kind) != (pending.table.entity, pending.table.kind):
        return "no_such_table"
    if (
        table.is_facet and pending.record_key.directory_position < 0
    ):  # the attribute's values have changed since the night
        return "not_in_generation"
    record_key = find_record_key(previous, table, entity_id)
    # Never an overlay, which would be computed by the previous generation.
    return record_key if record_key.directory_position >= 0 else "not_in_generation"
