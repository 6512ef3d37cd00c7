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
from serving.generations.served_set import Holding
from serving.generations.snapshot import Snapshot
from serving.lookup.answer_builder import Turn, left_out
from serving.lookup.entity import Case, cases_of
from serving.lookup.event_counting import count_as
from serving.lookup.ladder import Ladder
from serving.ranking.filters import Filters, Search
from serving.ranking.user_vectors import metric_of, vector_table
from serving.rendering.answer_fields import Answer
from serving.requests.models import Ask


class VectorOf(NamedTuple):
    """Vector of an entity, where it came from, and why it was not a stored one."""

    vector: NDArray[np.float32]
    source: Source
    producer: str
    reason: str | None
    told: Mapping[str, bool] = MappingProxyType({})
    """Fields of an answer that are true because of it."""


class FilteredLookup:
    """Answers as the ladder does, of the items that pass the request's filter, in the order that it asks for."""

    def __init__(self, ladder: Ladder, filters: Filters) -> None:
        self._ladder = ladder
        self._filters = filters

    async def lookup(self, holding: Holding, ask: Ask, started: float) -> list[Answer]:
        """Answers each entity once, in order, from what `holding` had when the request came."""
        holding = holding.pinned(ask.options.generation)
        cases = await cases_of(holding.live, ask)
        turn = Turn.of(ask.options, started)
        for case in cases:
            case.is_exact = True
        await self._filters.apply(holding, cases, turn)
        await self._ladder.resolve(holding, cases, turn)
        if waiting := [case for case in cases if case.answer is None]:
            await self._search(holding, waiting, turn)
        return [case.answer for case in cases if case.answer is not None]

    async def _search(self, holding: Holding, cases: list[Case], turn: Turn) -> None:
        """The best of what passes, where a list had too little of it; else, and under overload, what the list had."""
        snapshot = holding.live
        passing = turn.passing(snapshot)
        admitted = [case for case in cases if self._is_admitted(case)]
        vectors = await self._vectors_of(holding, admitted, turn)
        known = [(case, each) for case, each in zip(admitted, vectors, strict=True) if each]
        if known and passing is not None:
            searches = [_search_of(case, snapshot, each.vector, turn) for case, each in known]
            found = await self._filters.search(snapshot, passing, searches, turn.deadline)
            pace = YieldPacer(turn.options)
            for (case, each), best in zip(known, found or (), strict=False):
                await pace.step(case.entity)
                case.reason = each.reason
                # Its vector counts the events, or is one that no event changes, and its items are left out.
                case.is_settled = bool(each.told)
                self._ladder.reply.searched(
                    case, snapshot, best, each.source, each.producer, turn, each.told
                )
        for case in cases:
            if case.answer is None:
                self._ladder.reply.settle(case, snapshot, turn)

    def _is_admitted(self, case: Case) -> bool:
        if self._filters.admit():
            return True
        case.live_reason = LiveReason.OVERLOADED
        return False

    async def _vectors_of(
        self, holding: Holding, cases: Sequence[Case], turn: Turn
    ) -> list[VectorOf | None]:
        """Vectors of the entities, in order; None where there is none of this generation."""
        snapshot = holding.live
        found: list[VectorOf | None] = [None] * len(cases)
        users = [place for place, case in enumerate(cases) if case.table.entity == "user"]
        for place, case in enumerate(cases):
            if (ordinal := case.own_ordinal) is not None:
                source = Source.LIVE if case.found is None else Source(case.found.tier)
                found[place] = VectorOf(
                    snapshot.items.vectors[ordinal], source, "batch",
                    case.reason if case.found is None else None,
                )  # fmt: skip
        if users:
            table = vector_table(snapshot).name
            entities = tuple(cases[place].entity.of_table(table) for place in users)
            options = replace(turn.options, k=None, filter=None, rerank=None, exclude=())
            of_vectors = await cases_of(snapshot, Ask(entities, options))
            for place, of_vector in zip(users, of_vectors, strict=True):
                of_vector.is_exact = True
                count_as(snapshot, of_vector, cases[place])
            part = Turn.of(options, turn.started, is_part=True)
            answers = await self._ladder.resolve(holding, of_vectors, part)
            for place, of_vector, answer in zip(users, of_vectors, answers, strict=True):
                if answer["vector"] is not None and answer["generation"] == snapshot.generation:
                    told = {"approximate": True} if answer.get("approximate") else {}
                    found[place] = VectorOf(
                        answer["vector"], answer["source"], answer["producer"],
                        answer.get("reason"), told,
                    )  # fmt: skip
                elif cases[place].live_reason is None:
                    cases[place].live_reason = of_vector.live_reason
        return found


def _search_of(case: Case, snapshot: Snapshot, vector: NDArray[np.float32], turn: Turn) -> Search:
    """Search that leaves out what a list leaves out; for another order it finds as many as a list has."""
    k = case.k if turn.options.rerank is None else case.table.layout.width
    return Search(vector, left_out(case, snapshot, turn), k, metric_of(snapshot, case.table))
