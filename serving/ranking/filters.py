"""Filters of requests: what passes of a generation, and lists found among it by vectors, off the event loop."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.filters.expression import Filter, InvalidFilter
from cache.filters.filtering import unknown_filter
from cache.filters.masks import Passing, UnknownAttribute
from cache.filters.reranking import Reranker, Reranking, below
from cache.model.ranking import Metric
from serving.generations.served_set import Holding
from serving.generations.snapshot import Snapshot
from serving.lookup.answer_builder import Searched, Turn
from serving.lookup.entity import Case
from serving.requests.errors import Problem, from_input, unprocessable

_INLINE_ITEMS = 65_536
"""Items up to which a filter is worked out on the event loop: a hop to a thread would take as long."""
_INLINE_ROWS = 4_096
"""Vectors up to which a search is made there."""

_Result = TypeVar("_Result")


class Search(NamedTuple):
    """Search for one list: a vector, ordinals to leave out, and how many are wanted."""

    vector: NDArray[np.float32]
    gone: NDArray[np.int64]
    k: int
    metric: Metric


class Filters:
    """Filters of requests, worked out by threads, whose number bounds what is under way at once.

    A list is searched for where `admit` lets it, as it lets an input go to the model.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        admit: Callable[[], bool] = lambda: True,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admit = admit
        self._executor = executor
        self._timer = timer

    async def apply(self, holding: Holding, cases: Sequence[Case], turn: Turn) -> None:
        """Works out what passes, and another order, in each generation held.

        Raises Problem for what the live one cannot take.
        """
        options = turn.options
        field = "rerank" if options.filter is None else "filter"
        for case in cases:
            if case.table.kind != "topk":
                raise unprocessable(
                    f"invalid_{field}",
                    f"{case.table.name} holds no lists: {field} goes with tables that do",
                    field,
                )
            if case.table.is_facet and options.filter is not None:
                raise unprocessable(
                    "invalid_filter",
                    f"{case.table.name} is a facet, whose values have no vector to find more by: ask another table",
                    "filter",
                )
        await self._shape(holding.live, turn)
        if holding.previous is not None:
            # Where its items had other attributes, it cannot answer this.
            with contextlib.suppress(Problem):
                await self._shape(holding.previous, turn)

    async def _shape(self, snapshot: Snapshot, turn: Turn) -> None:
        options = turn.options
        if options.filter is not None:
            turn.passes(snapshot, await self._passed(snapshot, options.filter))
        if (reranker := await self.reranker(snapshot, options.rerank)) is not None:
            turn.reranks(snapshot, reranker)

    async def reranker(self, snapshot: Snapshot, reranking: Reranking | None) -> Reranker | None:
        """Re-ranking of a generation's items, None without one; raises Problem for one that it cannot take."""
        if reranking is None:
            return None
        try:
            return await self._reranker(snapshot, reranking)
        except InvalidFilter as error:
            raise from_input(error, "rerank") from error

    async def _reranker(self, snapshot: Snapshot, reranking: Reranking) -> Reranker:
        boosted = []
        for place, each in enumerate(reranking.boosts):
            try:
                boosted.append(await self._known(snapshot, each.filter))
            except InvalidFilter as error:
                raise below(error, f"boost[{place}].filter") from error
        attributes = None if snapshot.filtering is None else snapshot.filtering.attributes
        return Reranker(reranking, tuple(boosted), attributes, snapshot.items.vectors)

    async def passing(self, snapshot: Snapshot, filter_: Filter | str | None) -> Passing | None:
        """Items of a generation that pass, None without a filter; raises Problem for one that it cannot take."""
        return None if filter_ is None else await self._passed(snapshot, filter_)

    async def _passed(self, snapshot: Snapshot, filter_: Filter | str) -> Passing:
        try:
            return await self._known(snapshot, filter_)
        except InvalidFilter as error:
            raise from_input(error, "filter") from error

    async def _known(self, snapshot: Snapshot, filter_: Filter | str) -> Passing:
        filtering = snapshot.filtering
        if filtering is None:
            if isinstance(filter_, str):
                raise unknown_filter(filter_)
            raise UnknownAttribute(
                "items of this generation have no attributes: [sources] item_attributes names them for the next night",
                attributes={},
            )
        found = filtering.kept(filter_)
        if found is None:
            is_short = filtering.attributes.count <= _INLINE_ITEMS
            found = await self._work(lambda: filtering.passing(filter_), is_short=is_short)
        return found

    async def search(
        self, snapshot: Snapshot, passing: Passing, searches: Sequence[Search], deadline: float
    ) -> list[Searched] | None:
        """Best of what passes for each vector, in order; None where that is not done by `deadline` (monotonic)."""
        filtering = snapshot.filtering
        assert filtering is not None  # noqa: S101 - something passes

        def all_of_them() -> list[Searched] | None:
            found = []
            for each in searches:
                if self._timer() > deadline:  # nobody waits any more, and others do
                    return None
                found.append(filtering.best(each.vector, passing, each.gone, each.k, each.metric))
            return found

        is_short = passing.count * len(searches) <= _INLINE_ROWS
        if self._executor is None or is_short:
            return all_of_them()
        working = asyncio.get_running_loop().run_in_executor(self._executor, all_of_them)
        done, _ = await asyncio.wait({working}, timeout=max(0.0, deadline - self._timer()))
        if not done:
            working.cancel()  # what waits for a thread is not begun
            return None
        return working.result()

    async def _work(self, work: Callable[[], _Result], *, is_short: bool) -> _Result:
        if self._executor is None or is_short:
            return work()
        # Never behind searches: whoever asks for what passes waits for it without a deadline.
        return await asyncio.get_running_loop().run_in_executor(None, work)
