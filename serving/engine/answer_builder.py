"""Builder of an entity's answer from a record or a default: filters items, resolves their ids, counts the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache.model.filter_mask import FilterMask
from cache.records import Record
from cache.tiers.reads import MissReason
from serving.engine.answer_observer import AnswerObserver, AnswerSample
from serving.engine.entity import PartialList, PendingAnswer
from serving.engine.rendering.answer_fields import (
    Exclusions,
    Prediction,
    Reranker,
    build_list,
    complete_answer,
    may_have_more_items,
    prediction_from_defaults,
    prediction_from_record,
)
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.requests.answers import FALLBACK_SOURCES, STORED_SOURCES, Source
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason


@dataclass(frozen=True, slots=True)
class RequestContext:
    """State shared by all entities of one request; times are monotonic.

    `is_part_of_answer`: the lookup is part of another answer (such as the vector for a search), and only that answer is
    counted.
    """

    options: RequestOptions
    request_started_at: float
    deadline_at: float
    is_part_of_answer: bool = False
    _excluded_ordinals_by_generation: dict[str, frozenset[int]] = field(default_factory=dict)
    _filter_mask_by_generation: dict[str, FilterMask] = field(default_factory=dict)
    _reranker_by_generation: dict[str, Reranker] = field(default_factory=dict)

    @classmethod
    def of(cls, options: RequestOptions, request_started_at: float, *, is_part_of_answer: bool = False) -> Self:
        """Build the state of a request that arrived at `request_started_at`."""
        return cls(options, request_started_at, request_started_at + options.deadline_s, is_part_of_answer)

    def excluded_ordinals(self, snapshot: Snapshot) -> frozenset[int]:
        """Return the ordinals of `exclude`, looked up once per generation and not once per entity."""
        if not self.options.exclude:
            return frozenset()
        excluded_ordinals = self._excluded_ordinals_by_generation.get(snapshot.generation)
        if excluded_ordinals is None:
            ordinals = snapshot.numbers_of(self.options.exclude)
            excluded_ordinals = self._excluded_ordinals_by_generation[snapshot.generation] = frozenset(
                ordinals.tolist()
            )
        return excluded_ordinals

    def set_filter_mask(self, snapshot: Snapshot, filter_mask: FilterMask) -> None:
        """Set the mask of a generation's items that pass the filter."""
        self._filter_mask_by_generation[snapshot.generation] = filter_mask

    def filter_mask(self, snapshot: Snapshot) -> FilterMask | None:
        """Return the mask of a generation's items that pass the filter; None without one."""
        return self._filter_mask_by_generation.get(snapshot.generation)

    def set_reranker(self, snapshot: Snapshot, reranker: Reranker) -> None:
        """Set the re-ranker of a generation's items."""
        self._reranker_by_generation[snapshot.generation] = reranker

    def reranker(self, snapshot: Snapshot) -> Reranker | None:
        """Return the re-ranker of a generation's items; None without one."""
        return self._reranker_by_generation.get(snapshot.generation)

    def reranking_names(self, snapshot: Snapshot) -> str | None:
        """Return the names of the re-ranking's parts for the answer; None if the order was not changed."""
        rerank = self.options.rerank
        return rerank.part_names if rerank and snapshot.generation in self._reranker_by_generation else None

    def can_reshape(self, snapshot: Snapshot) -> bool:
        """True if a list of this generation can be filtered and re-ranked as the request asks."""
        options = self.options
        return (options.filter is None or snapshot.generation in self._filter_mask_by_generation) and (
            options.rerank is None or snapshot.generation in self._reranker_by_generation
        )


SearchResult = tuple[NDArray[np.uint32], NDArray[np.float32]]
"""Ordinals and scores, best first."""


class AnswerBuilder:
    """Builder of the answers of pending entities."""

    def __init__(
        self,
        metrics: Metrics,
        observer: AnswerObserver,
        monotonic_clock: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._observer = observer
        self._monotonic_clock = monotonic_clock
        self._clock = clock

    def answer_from_record(
        self,
        pending: PendingAnswer,
        snapshot: Snapshot,
        record: Record,
        source: Source,
        context: RequestContext,
        *,
        min_items: int = 1,
        seen_ordinals: frozenset[int] = frozenset(),
    ) -> None:
        """Set the answer, unless a list has fewer than `min_items` items left and a lower rung may have more.

        If fewer than k items pass a filter, they become `pending.partial_list`: a search by vectors may find more.
        `seen_ordinals` are the user's past items, if the list was computed without knowing them.
        """
        table = snapshot.manifest.tables[pending.table.name]
        exclusions: Exclusions = (context.excluded_ordinals(snapshot), seen_ordinals)
        # A live record was computed from the sent history, which it excludes; with counted events, from the events'
        # history.
        is_computed_from_history = source is Source.LIVE and pending.counted_events is None
        if not is_computed_from_history and table.kind == "topk" and pending.entity.history:
            exclusions += (pending.history_in(snapshot).item_numbers,)
        current_values, entity_id = snapshot.changed_values_by_facet.get(table.name), pending.entity.raw_id
        if current_values is not None and entity_id is not None and record.item_ordinals is not None:
            outdated_ordinals = record.item_ordinals[
                ~current_values.mask_having_text(entity_id.decode(), record.item_ordinals)
            ]
            exclusions += (frozenset(outdated_ordinals.tolist()),)
        exclusions += self._newer_event_items(pending, snapshot, source)
        filter_mask, reranker = context.filter_mask(snapshot), context.reranker(snapshot)
        if not context.can_reshape(snapshot):
            return
        prediction = prediction_from_record(snapshot, table, record, pending.k, exclusions, filter_mask, reranker)
        if record.item_ordinals is not None:
            left_item_count = len(prediction["items"])
            lacks_history = (
                record.is_live
                and table.entity == "user"
                and source is not Source.LIVE
                and pending.counted_events is None
                and not pending.entity.history
            )
            if filter_mask is not None and may_have_more_items(prediction, record, table, lacks_history=lacks_history):
                pending.reason = MissReason.FILTERED
                producer = "live" if record.is_live else "batch"
                pending.partial_list = PartialList(
                    prediction, snapshot, source, producer, filter_mask, record.answer_flags, seen_ordinals
                )
                return
            # Items that a re-ranking leaves out would be missing from any other list of the same items, too.
            required_count = min_items if reranker is None else 1
            is_used_up = left_item_count == 0 or left_item_count < min(required_count, len(record.item_ordinals))
            if filter_mask is None and is_used_up and not pending.is_answered_by_night(record):
                pending.reason = MissReason.EXHAUSTED
                return
        producer = "live" if record.is_live else "batch"
        self._complete_answer(pending, prediction, snapshot, source, producer, context, record.answer_flags)
        self._offer_to_sampler(pending, snapshot, source, producer, exclusions, context)

    def answer_from_search(
        self,
        pending: PendingAnswer,
        snapshot: Snapshot,
        search_result: SearchResult,
        source: Source,
        producer: str,
        context: RequestContext,
        flag_fields: Mapping[str, bool],
    ) -> None:
        """Answer with the best items that pass the filter; `flag_fields` are true fields of the searched vector.

        The answer's reason is that of the vector.
        """
        prediction = build_list(snapshot, *search_result, pending.k, context.reranker(snapshot))
        self._complete_answer(pending, prediction, snapshot, source, producer, context, flag_fields)

    def answer_partial(self, pending: PendingAnswer, snapshot: Snapshot, context: RequestContext) -> None:
        """Answer with the list items that pass the filter; `short` and the reason say that more items may pass."""
        if pending.partial_list is None:
            self.answer_by_default(pending, snapshot, context)
            return
        # The list's generation may be the previous one, which has other ordinals.
        prediction, list_snapshot, source, producer, filter_mask, flag_fields, seen_ordinals = pending.partial_list
        excluded_ordinals = (
            left_out_ordinals(pending, list_snapshot, context)
            if list_snapshot is snapshot
            else _left_out_of_previous(pending, list_snapshot, context, seen_ordinals)
        )
        prediction["short"] = _is_list_short(filter_mask, excluded_ordinals, pending.k)
        self._complete_answer(pending, prediction, list_snapshot, source, producer, context, flag_fields)

    def answer_by_default(self, pending: PendingAnswer, snapshot: Snapshot, context: RequestContext) -> None:
        """Answer with the table's defaults, which are the same for all users."""
        pending.reason = pending.reason or MissReason.NOT_IN_GENERATION
        seen_ordinals = frozenset(pending.find_seen_ordinals(snapshot).tolist())
        event_exclusions = self._newer_event_items(pending, snapshot, Source.DEFAULT)
        exclusions: Exclusions = (context.excluded_ordinals(snapshot), seen_ordinals, *event_exclusions)
        filter_mask = context.filter_mask(snapshot)
        prediction = prediction_from_defaults(
            snapshot, pending.table, pending.entity, pending.k, exclusions, filter_mask, context.reranker(snapshot)
        )
        if filter_mask is not None:
            prediction["short"] = _is_list_short(filter_mask, left_out_ordinals(pending, snapshot, context), pending.k)
        producer = "defaults" if pending.table.name in snapshot.default_list_by_table else None
        self._complete_answer(pending, prediction, snapshot, Source.DEFAULT, producer, context, {})

    @staticmethod
    def _newer_event_items(pending: PendingAnswer, snapshot: Snapshot, source: Source) -> Exclusions:
        """Return the items of newer events if the list was computed without these events, else nothing."""
        if pending.counted_events is None or pending.table.kind != "topk" or _counts_newer_events(pending, source):
            return ()
        return (frozenset(snapshot.numbers_of(pending.counted_events.event_item_ids).tolist()),)

    def _complete_answer(
        self,
        pending: PendingAnswer,
        prediction: Prediction,
        snapshot: Snapshot,
        source: Source,
        producer: str | None,
        context: RequestContext,
        flag_fields: Mapping[str, bool],
    ) -> None:
        table = pending.table.name
        # A history that only excluded items from a nightly list was not used to compute.
        is_history_used = (pending.counted_events is None or pending.counted_events.counts_sent_input) and (
            producer == "live" or pending.live_failure_reason == LiveReason.NO_USABLE_INPUT
        )
        dropped_count = 0
        if is_history_used:
            unknown_by_live = pending.unknown_id_count if source is Source.LIVE else None
            dropped_count = (
                pending.history_in(snapshot).unknown_id_count if unknown_by_live is None else unknown_by_live
            )
        if (counted_events := pending.counted_events) is not None:
            if counted_events.is_approximate or not _counts_newer_events(pending, source):
                flag_fields = {"approximate": True, **flag_fields}
            if pending.is_settled_for_stored:
                # Without a live reason, or input for the model, the events change no computed answer.
                if pending.live_failure_reason not in (None, LiveReason.NO_USABLE_INPUT):
                    pending.reason = pending.reason or MissReason.NEWER_EVENTS
            elif pending.reason is not None and pending.reason.traits.is_nowhere:
                pending.reason = MissReason.NEWER_EVENTS
        if pending.is_as_of_before_night:
            flag_fields = {"approximate": True, **flag_fields}
        reason = None if pending.reason is None else pending.reason.public_reason
        pending.answer = complete_answer(
            prediction, snapshot, table, pending.entity, source, producer, self._clock(),
            reason=reason, live=pending.live_failure_reason, dropped_history=dropped_count or None,
            reranked=context.reranking_names(snapshot), near=pending.near_distance if source is Source.LIVE else None,
            events=counted_events and counted_events.event_count,
            as_of=counted_events and counted_events.newest_accepted_at,
            **flag_fields,
        )  # fmt: skip
        if not context.is_part_of_answer:
            self._count_answer(pending, snapshot, source, context)
        elif source is Source.L2 and pending.record_key.directory_position >= 0:
            self._observer.note_read(snapshot.generation, table, (pending.record_key.hash_or_digest,))

    def _count_answer(
        self, pending: PendingAnswer, snapshot: Snapshot, source: Source, context: RequestContext
    ) -> None:
        """Count the answer by source and reason."""
        table = pending.table.name
        if pending.counted_events is not None:
            self._metrics.changed_answers.answer_count_by_table[table] += 1
        self._metrics.answered(table, source, self._monotonic_clock() - context.request_started_at)
        if source not in STORED_SOURCES:
            entity_key, reason = pending.record_key.hash_or_digest, pending.reason
            counted_reason = self._observer.classify_miss(snapshot.generation, table, entity_key, reason)
            self._metrics.missed(table, counted_reason)
        elif source is Source.L2:
            self._observer.count_read(
                snapshot.generation,
                table,
                pending.record_key.hash_or_digest,
                pending.record_key.directory_position >= 0,
            )
        if pending.is_cold:
            for on_cold_id in self._observer.on_unknown_id:
                on_cold_id((table, pending.entity.raw_id or b""))

    def _offer_to_sampler(
        self,
        pending: PendingAnswer,
        snapshot: Snapshot,
        source: Source,
        producer: str,
        exclusions: Exclusions,
        context: RequestContext,
    ) -> None:
        """Offer the answer to the sampler if it is the one that was computed for this input.

        Reused near answers are measured separately.
        """
        is_near = pending.near_distance is not None and source is Source.LIVE
        has_new_items = bool(pending.new_items) and (source is Source.LIVE or pending.may_name_new_items)
        if context.options.is_reshaped or is_near or has_new_items or pending.counted_events is not None:
            return
        sampler = self._observer.sampler
        sampler.countdown -= 1
        if sampler.countdown >= 0:
            return
        sampler.draw_indices(1)
        entity_id = pending.entity.raw_id
        if entity_id is not None:
            sent_input = pending.live_input if producer == "live" and pending.entity.has_input else None
            sampler.put(AnswerSample(
                snapshot.generation, pending.table.name, entity_id, source, producer, self._clock(),
                answer_fields=pending.answer, caller_input=sent_input, exclusions=exclusions,
            ))  # fmt: skip


def _counts_newer_events(pending: PendingAnswer, source: Source) -> bool:
    """True if the answer was computed from the newer events that the entity counts."""
    return not pending.is_settled_for_stored and source not in FALLBACK_SOURCES


def left_out_ordinals(pending: PendingAnswer, snapshot: Snapshot, context: RequestContext) -> NDArray[np.int64]:
    """Return the ordinals int64 that a list leaves out, the user's history included."""
    excluded_ordinals = (
        context.excluded_ordinals(snapshot) | pending.history_in(snapshot).item_numbers | snapshot.blocked_item_numbers
    )
    if (own_ordinal := pending.own_ordinal) is not None:  # an item is not similar to itself
        excluded_ordinals |= {own_ordinal}
    if pending.counted_events is not None:
        excluded_ordinals |= frozenset(snapshot.numbers_of(pending.counted_events.event_item_ids).tolist())
    if snapshot.new_items:  # new items that this answer does not name
        nameable_count = snapshot.items.count + len(pending.new_items)
        excluded_ordinals |= frozenset(range(nameable_count, snapshot.nameable_item_count))
    ordinals = np.concatenate([np.array(sorted(excluded_ordinals), np.int64), pending.find_seen_ordinals(snapshot)])
    return ordinals[ordinals >= 0]  # -1: excluded ids that are not items


def _left_out_of_previous(
    pending: PendingAnswer, previous: Snapshot, context: RequestContext, seen_ordinals: frozenset[int]
) -> NDArray[np.int64]:
    """Return the ordinals int64 that a list of the previous generation leaves out, `seen_ordinals` included."""
    excluded_ordinals = (
        context.excluded_ordinals(previous)
        | pending.history_in(previous).item_numbers
        | previous.blocked_item_numbers
        | seen_ordinals
    )
    if pending.table.entity == "item" and pending.entity.raw_id is not None:
        excluded_ordinals |= frozenset(previous.numbers_of((pending.entity.raw_id,)).tolist())
    if pending.counted_events is not None:
        excluded_ordinals |= frozenset(previous.numbers_of(pending.counted_events.event_item_ids).tolist())
    excluded_ordinals |= frozenset(range(previous.items.count, previous.nameable_item_count))  # no new items
    return np.array([ordinal for ordinal in sorted(excluded_ordinals) if ordinal >= 0], np.int64)


def _is_list_short(filter_mask: FilterMask, excluded_ordinals: NDArray[np.int64], k: int) -> bool:
    """True if fewer than k of the generation's items pass the filter and are not excluded."""
    return filter_mask.passing_count - int(filter_mask.among(np.unique(excluded_ordinals)).sum()) < k
