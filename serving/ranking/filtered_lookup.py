"""Lookup under a filter or in another order: from the list if enough of it passes, else the best of all that passes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.admission.work_pacer import YieldPacer
from serving.answers.reasons import LiveReason
from serving.answers.sources import Source
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.lookup.answer_builder import RequestContext, left_out
from serving.lookup.entity import PendingAnswer, build_pending_answers
from serving.lookup.event_counting import count_as
from serving.lookup.ladder import Ladder
from serving.ranking.filters import Filters, VectorSearch
from serving.ranking.user_vectors import metric_of, vector_table
from serving.rendering.answer_fields import AnswerJson
from serving.requests.models import LookupRequest


class SourcedVector(NamedTuple):
    """Vector of an entity, where it came from, and why it was not a stored one."""

    vector: NDArray[np.float32]
    source: Source
    producer: str
    reason: str | None
    answer_flags: Mapping[str, bool] = MappingProxyType({})
    """Fields of an answer that are true because of it."""


class FilteredLookup:
    """Answers as the ladder does, of the items that pass the request's filter, in the order that it asks for."""

    def __init__(self, ladder: Ladder, filters: Filters) -> None:
        self._ladder = ladder
        self._filters = filters

    async def lookup(
        self, served: ServedGenerations, request: LookupRequest, started: float
    ) -> list[AnswerJson]:
        """Answers each entity once, in order, from what `served` had when the request came."""
        served = served.pinned(request.options.generation)
        cases = await build_pending_answers(served.live, request)
        context = RequestContext.of(request.options, started)
        for case in cases:
            case.is_exact = True
        await self._filters.apply(served, cases, context)
        await self._ladder.resolve(served, cases, context)
        if waiting := [case for case in cases if case.answer is None]:
            await self._search(served, waiting, context)
        return [case.answer for case in cases if case.answer is not None]

    async def _search(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """The best of what passes, where a list had too little of it; else, and under overload, what the list had."""
        snapshot = served.live
        filter_mask = context.filter_mask(snapshot)
        admitted = [case for case in cases if self._is_admitted(case)]
        vectors = await self._vectors_of(served, admitted, context)
        pending_vectors = [
            (case, entity_vector)
            for case, entity_vector in zip(admitted, vectors, strict=True)
            if entity_vector
        ]
        if pending_vectors and filter_mask is not None:
            searches = [
                _search_of(case, snapshot, entity_vector.vector, context)
                for case, entity_vector in pending_vectors
            ]
            search_results = await self._filters.search(
                snapshot, filter_mask, searches, context.deadline
            )
            pace = YieldPacer(context.options)
            for (case, entity_vector), search_result in zip(
                pending_vectors, search_results or (), strict=False
            ):
                await pace.step(case.entity)
                case.reason = entity_vector.reason
                # Its vector counts the events, or is one that no event changes, and its items are left out.
                case.is_settled = bool(entity_vector.answer_flags)
                self._ladder.answer_builder.searched(
                    case,
                    snapshot,
                    search_result,
                    entity_vector.source,
                    entity_vector.producer,
                    context,
                    entity_vector.answer_flags,
                )
        for case in cases:
            if case.answer is None:
                self._ladder.answer_builder.answer_partial(case, snapshot, context)

    def _is_admitted(self, case: PendingAnswer) -> bool:
        if self._filters.admit():
            return True
        case.live_reason = LiveReason.OVERLOADED
        return False

    async def _vectors_of(
        self, served: ServedGenerations, cases: Sequence[PendingAnswer], context: RequestContext
    ) -> list[SourcedVector | None]:
        """Vectors of the entities, in order; None where there is none of this generation."""
        snapshot = served.live
        entity_vectors: list[SourcedVector | None] = [None] * len(cases)
        users = [index for index, case in enumerate(cases) if case.table.entity == "user"]
        for index, case in enumerate(cases):
            if (ordinal := case.own_ordinal) is not None:
                source = Source.LIVE if case.hit is None else Source(case.hit.tier)
                entity_vectors[index] = SourcedVector(
                    snapshot.items.vectors[ordinal], source, "batch",
                    case.reason if case.hit is None else None,
                )  # fmt: skip
        if users:
            table = vector_table(snapshot).name
            entities = tuple(cases[index].entity.of_table(table) for index in users)
            options = replace(context.options, k=None, filter=None, rerank=None, exclude=())
            of_vectors = await build_pending_answers(snapshot, LookupRequest(entities, options))
            for index, of_vector in zip(users, of_vectors, strict=True):
                of_vector.is_exact = True
                count_as(snapshot, of_vector, cases[index])
            part = RequestContext.of(options, context.started, is_part=True)
            answers = await self._ladder.resolve(served, of_vectors, part)
            for index, of_vector, answer in zip(users, of_vectors, answers, strict=True):
                if answer["vector"] is not None and answer["generation"] == snapshot.generation:
                    flag_fields = {"approximate": True} if answer.get("approximate") else {}
                    entity_vectors[index] = SourcedVector(
                        answer["vector"], answer["source"], answer["producer"],
                        answer.get("reason"), flag_fields,
                    )  # fmt: skip
                elif cases[index].live_reason is None:
                    cases[index].live_reason = of_vector.live_reason
        return entity_vectors


def _search_of(
    case: PendingAnswer, snapshot: Snapshot, vector: NDArray[np.float32], context: RequestContext
) -> VectorSearch:
    """Search that leaves out what a list leaves out; for another order it finds as many as a list has."""
    k = case.k if context.options.rerank is None else case.table.layout.width
    return VectorSearch(
        vector, left_out(case, snapshot, context), k, metric_of(snapshot, case.table)
    )
