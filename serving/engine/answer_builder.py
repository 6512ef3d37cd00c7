"""Builder of an entity's answer from a record or a default: filters, names and counts it."""

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
    complete,
    from_defaults,
    from_record,
    is_cut,
)
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.requests.answers import FALLBACKS, STORED_SOURCES, Source
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason


@dataclass(frozen=True, slots=True)
class RequestContext:
    """State that all entities of one request share; times are monotonic.

    If it `is_part` of another answer (a vector that a list is searched with), only that answer is counted.
    """

    options: RequestOptions
    started: float
    deadline: float
    is_part: bool = False
    _excluded: dict[str, frozenset[int]] = field(default_factory=dict)
    _filter_mask_by_generation: dict[str, FilterMask] = field(default_factory=dict)
    _rerankers: dict[str, Reranker] = field(default_factory=dict)

    @classmethod
    def of(cls, options: RequestOptions, started: float, *, is_part: bool = False) -> Self:
        """Build the state of a request that came at `started`."""
        return cls(options, started, started + options.deadline_s, is_part)

    def excluded(self, snapshot: Snapshot) -> frozenset[int]:
        """Return the ordinals of `exclude`, looked up once per generation and not once per entity."""
        if not self.options.exclude:
            return frozenset()
        excluded_ordinals = self._excluded.get(snapshot.generation)
        if excluded_ordinals is None:
            ordinals = snapshot.numbers_of(self.options.exclude)
            excluded_ordinals = self._excluded[snapshot.generation] = frozenset(ordinals.tolist())
        return excluded_ordinals

    def set_filter_mask(self, snapshot: Snapshot, filter_mask: FilterMask) -> None:
        """Set the mask of a generation's items that pass the filter."""
        self._filter_mask_by_generation[snapshot.generation] = filter_mask

    def filter_mask(self, snapshot: Snapshot) -> FilterMask | None:
        """Return the mask of a generation's items that pass the filter; None without one."""
        return self._filter_mask_by_generation.get(snapshot.generation)

    def set_reranker(self, snapshot: Snapshot, reranker: Reranker) -> None:
        """Set the re-ranker of a generation's items."""
        self._rerankers[snapshot.generation] = reranker

    def reranker(self, snapshot: Snapshot) -> Reranker | None:
        """Return the re-ranker of a generation's items; None without one."""
        return self._rerankers.get(snapshot.generation)

    def reranked(self, snapshot: Snapshot) -> str | None:
        """Return the names of the re-ranking's parts for the answer; None if the order was not changed."""
        rerank = self.options.rerank
        return rerank.part_names if rerank and snapshot.generation in self._rerankers else None

    def can_take(self, snapshot: Snapshot) -> bool:
        """True if a list of this generation can be filtered and re-ranked as the request asks."""
        options = self.options
        return (
            options.filter is None or snapshot.generation in self._filter_mask_by_generation
        ) and (options.rerank is None or snapshot.generation in self._rerankers)


Searched = tuple[NDArray[np.uint32], NDArray[np.float32]]
"""Ordinals and scores, best first."""


class AnswerBuilder:
    """Builder of the answers of pending entities."""

    def __init__(
        self,
        metrics: Metrics,
        watch: AnswerObserver,
        timer: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._watch = watch
        self._timer = timer
        self._clock = clock

    def answer(
        self,
        case: PendingAnswer,
        snapshot: Snapshot,
        record: Record,
        source: Source,
        context: RequestContext,
        *,
        min_items: int = 1,
        seen_ordinals: frozenset[int] = frozenset(),
    ) -> None:
        """Set the answer, unless fewer than `min_items` items of a list are left and a lower rung may have more.

        If fewer than k items pass a filter, they are kept as partial: a search by vectors may find more.
        `seen_ordinals` are items that the user had, for a list that was made without them.
        """
        table = snapshot.manifest.tables[case.table.name]
        exclusions: Exclusions = (context.excluded(snapshot), seen_ordinals)
        # A live record was computed from this very history, and leaves it out; one with events from theirs.
        is_of_history = source is Source.LIVE and case.counted_events is None
        if not is_of_history and table.kind == "topk" and case.entity.history:
            exclusions += (case.history_in(snapshot).item_numbers,)
        column, raw = snapshot.changed_facets.get(table.name), case.entity.raw
        if column is not None and raw is not None and record.items is not None:
            outdated_ordinals = record.items[~column.mask_having_text(raw.decode(), record.items)]
            exclusions += (frozenset(outdated_ordinals.tolist()),)
        exclusions += self._newer_event_items(case, snapshot, source)
        filter_mask, reranker = context.filter_mask(snapshot), context.reranker(snapshot)
        if not context.can_take(snapshot):
            return
        prediction = from_record(snapshot, table, record, case.k, exclusions, filter_mask, reranker)
        if record.items is not None:
            item_count = len(prediction["items"])
            lacks_history = (
                record.live
                and table.entity == "user"
                and source is not Source.LIVE
                and case.counted_events is None
                and not case.entity.history
            )
            if filter_mask is not None and is_cut(
                prediction, record, table, lacks_history=lacks_history
            ):
                case.reason = MissReason.FILTERED
                producer = "live" if record.live else "batch"
                case.partial = PartialList(
                    prediction,
                    snapshot,
                    source,
                    producer,
                    filter_mask,
                    record.answer_flags,
                    seen_ordinals,
                )
                return
            # What a re-ranking leaves out, no other list of the same items would have more of.
            required_count = min_items if reranker is None else 1
            is_used_up = item_count == 0 or item_count < min(required_count, len(record.items))
            if filter_mask is None and is_used_up and not case.is_answered_by_night(record):
                case.reason = MissReason.EXHAUSTED
                return
        producer = "live" if record.live else "batch"
        self._finish(case, prediction, snapshot, source, producer, context, record.answer_flags)
        self._note(case, snapshot, source, producer, exclusions, context)

    def searched(
        self,
        case: PendingAnswer,
        snapshot: Snapshot,
        search_result: Searched,
        source: Source,
        producer: str,
        context: RequestContext,
        flag_fields: Mapping[str, bool],
    ) -> None:
        """Answer with the best items that pass the filter; `flag_fields` are true fields of the searched vector.

        The reason of the pending answer is that of the vector.
        """
        prediction = build_list(snapshot, *search_result, case.k, context.reranker(snapshot))
        self._finish(case, prediction, snapshot, source, producer, context, flag_fields)

    def answer_partial(
        self, case: PendingAnswer, snapshot: Snapshot, context: RequestContext
    ) -> None:
        """Answer with the items of a list that pass the filter; `short` and the reason say that more items may pass."""
        if case.partial is None:
            self.default(case, snapshot, context)
            return
        # Of the generation that the list is of, which may be the previous one, and that numbers items in its own way.
        prediction, of, source, producer, filter_mask, flag_fields, seen_ordinals = case.partial
        excluded_ordinals = (
            left_out(case, of, context)
            if of is snapshot
            else _left_out_before(case, of, context, seen_ordinals)
        )
        prediction["short"] = _is_short(filter_mask, excluded_ordinals, case.k)
        self._finish(case, prediction, of, source, producer, context, flag_fields)

    def default(self, case: PendingAnswer, snapshot: Snapshot, context: RequestContext) -> None:
        """Answer with the table's defaults, which are the same for all users."""
        case.reason = case.reason or MissReason.NOT_IN_GENERATION
        seen_ordinals = frozenset(case.find_seen_ordinals(snapshot).tolist())
        event_exclusions = self._newer_event_items(case, snapshot, Source.DEFAULT)
        exclusions: Exclusions = (context.excluded(snapshot), seen_ordinals, *event_exclusions)
        filter_mask = context.filter_mask(snapshot)
        prediction = from_defaults(
            snapshot,
            case.table,
            case.entity,
            case.k,
            exclusions,
            filter_mask,
            context.reranker(snapshot),
        )
        if filter_mask is not None:
            prediction["short"] = _is_short(filter_mask, left_out(case, snapshot, context), case.k)
        producer = "defaults" if case.table.name in snapshot.defaults else None
        self._finish(case, prediction, snapshot, Source.DEFAULT, producer, context, {})

    @staticmethod
    def _newer_event_items(case: PendingAnswer, snapshot: Snapshot, source: Source) -> Exclusions:
        """Return the items of newer events, for a list that was made without them."""
        if case.counted_events is None or case.table.kind != "topk" or _counts(case, source):
            return ()
        return (frozenset(snapshot.numbers_of(case.counted_events.items).tolist()),)

    def _finish(
        self,
        case: PendingAnswer,
        prediction: Prediction,
        snapshot: Snapshot,
        source: Source,
        producer: str | None,
        context: RequestContext,
        flag_fields: Mapping[str, bool],
    ) -> None:
        table = case.table.name
        # Of a history that only kept items out of a list of the night, nothing was used to compute.
        is_used = (case.counted_events is None or case.counted_events.counts_sent) and (
            producer == "live" or case.live_reason == LiveReason.NO_USABLE_INPUT
        )
        dropped_count = 0
        if is_used:
            by_live = case.unknown_id_count if source is Source.LIVE else None
            dropped_count = (
                case.history_in(snapshot).unknown_id_count if by_live is None else by_live
            )
        if (counted_events := case.counted_events) is not None:
            if counted_events.is_approximate or not _counts(case, source):
                flag_fields = {"approximate": True, **flag_fields}
            if case.reason is not None and case.reason.traits.is_nowhere and not case.is_settled:
                case.reason = MissReason.NEWER_EVENTS
        reason = None if case.reason is None else case.reason.public
        case.answer = complete(
            prediction, snapshot, table, case.entity, source, producer, self._clock(),
            reason=reason, live=case.live_reason, dropped_history=dropped_count or None,
            reranked=context.reranked(snapshot), near=case.near if source is Source.LIVE else None,
            events=counted_events and counted_events.events, as_of=counted_events and counted_events.as_of,
            **flag_fields,
        )  # fmt: skip
        if not context.is_part:
            self._observe(case, snapshot, source, context)
        elif source is Source.L2 and case.record_key.position >= 0:
            self._watch.note_read(snapshot.generation, table, (case.record_key.key,))

    def _observe(
        self, case: PendingAnswer, snapshot: Snapshot, source: Source, context: RequestContext
    ) -> None:
        """Count the answer by source and reason."""
        table = case.table.name
        if case.counted_events is not None:
            self._metrics.changed_answers.answers[table] += 1
        self._metrics.answered(table, source, self._timer() - context.started)
        if source not in STORED_SOURCES:
            key, reason = case.record_key.key, case.reason
            counted_reason = self._watch.classify_miss(snapshot.generation, table, key, reason)
            self._metrics.missed(table, counted_reason)
        elif source is Source.L2:
            self._watch.count_read(
                snapshot.generation, table, case.record_key.key, case.record_key.position >= 0
            )
        if case.is_cold:
            for note in self._watch.on_cold:
                note((table, case.entity.raw or b""))

    def _note(
        self,
        case: PendingAnswer,
        snapshot: Snapshot,
        source: Source,
        producer: str,
        exclusions: Exclusions,
        context: RequestContext,
    ) -> None:
        """Offer the answer to the sampler if it is the one that was computed for this input.

        Reused near answers have a measure of their own.
        """
        is_near = case.near is not None and source is Source.LIVE
        has_new = bool(case.new_items) and (source is Source.LIVE or case.names_new_items)
        if context.options.is_reshaped or is_near or has_new or case.counted_events is not None:
            return
        sampler = self._watch.sampler
        sampler.countdown -= 1
        if sampler.countdown >= 0:
            return
        sampler.draw_indices(1)
        raw = case.entity.raw
        if raw is not None:
            sent_input = case.live_input if producer == "live" and case.entity.has_input else None
            sampler.put(AnswerSample(
                snapshot.generation, case.table.name, raw, source, producer, self._clock(),
                fields=case.answer, caller_input=sent_input, exclusions=exclusions,
            ))  # fmt: skip


def _counts(case: PendingAnswer, source: Source) -> bool:
    """True if the answer was computed from the newer events that the entity counts."""
    return not case.is_settled and source not in FALLBACKS


def left_out(case: PendingAnswer, snapshot: Snapshot, context: RequestContext) -> NDArray[np.int64]:
    """Return the ordinals int64 that a list leaves out, the user's history included."""
    excluded_ordinals = (
        context.excluded(snapshot) | case.history_in(snapshot).item_numbers | snapshot.blocked
    )
    if (own_ordinal := case.own_ordinal) is not None:  # no item is similar to itself
        excluded_ordinals |= {own_ordinal}
    if case.counted_events is not None:
        excluded_ordinals |= frozenset(snapshot.numbers_of(case.counted_events.items).tolist())
    if snapshot.new_items:  # those that this answer does not name
        named = snapshot.items.count + len(case.new_items)
        excluded_ordinals |= frozenset(range(named, snapshot.numbered))
    ordinals = np.concatenate(
        [np.array(sorted(excluded_ordinals), np.int64), case.find_seen_ordinals(snapshot)]
    )
    return ordinals[ordinals >= 0]  # of what is excluded some may be no items


def _left_out_before(
    case: PendingAnswer, previous: Snapshot, context: RequestContext, seen_ordinals: frozenset[int]
) -> NDArray[np.int64]:
    """Return the ordinals int64 that a list of the previous generation leaves out, `seen_ordinals` included."""
    excluded_ordinals = (
        context.excluded(previous)
        | case.history_in(previous).item_numbers
        | previous.blocked
        | seen_ordinals
    )
    if case.table.entity == "item" and case.entity.raw is not None:
        excluded_ordinals |= frozenset(previous.numbers_of((case.entity.raw,)).tolist())
    if case.counted_events is not None:
        excluded_ordinals |= frozenset(previous.numbers_of(case.counted_events.items).tolist())
    excluded_ordinals |= frozenset(
        range(previous.items.count, previous.numbered)
    )  # it names no new item
    return np.array([ordinal for ordinal in sorted(excluded_ordinals) if ordinal >= 0], np.int64)


def _is_short(filter_mask: FilterMask, excluded_ordinals: NDArray[np.int64], k: int) -> bool:
    """True if fewer than k items in all pass the filter, without the excluded ones."""
    return filter_mask.count - int(filter_mask.among(np.unique(excluded_ordinals)).sum()) < k
