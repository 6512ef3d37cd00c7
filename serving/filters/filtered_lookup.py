"""Lookup with a filter or re-ranking: from the stored list if enough items pass, else by a search of all that pass."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.filters.expression import Filter, InvalidFilter
from cache.filters.filtering import Filtering, UnknownAttribute, unknown_filter_error
from cache.filters.reranker import Reranker
from cache.filters.reranking import Reranking, with_error_path
from cache.model.filter_mask import FilterMask
from cache.model.ranking import Metric
from cache.tiers.reads import MissReason
from serving.admission.work_pacer import YieldPacer
from serving.engine.answer_builder import RequestContext, SearchResult, left_out_ordinals
from serving.engine.entity import PendingAnswer, build_pending_answers
from serving.engine.hooks import ListShaper
from serving.engine.ladder import Ladder
from serving.engine.rendering.answer_fields import AnswerJson
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot, ranking_metric, user_vector_table
from serving.requests.answers import Source
from serving.requests.errors import Problem, problem_from_input, unprocessable
from serving.requests.models import LookupRequest
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason

FILTER_THREADS = 2
"""Number of threads that evaluate filters."""

WAITING_FILTERS_MAX = 64
"""Filters that may wait for a thread or be evaluated; requests with further filters are refused."""

_INLINE_COMPARISONS_MAX = 262_144
"""Number of comparisons up to which a filter is evaluated on the event loop: a switch to a thread takes as long."""

_INLINE_VECTORS_MAX = 4_096
"""Number of vectors up to which a search is made on the event loop."""


class VectorSearch(NamedTuple):
    """Search for one list: a vector, ordinals to leave out, and the number of items."""

    query_vector: NDArray[np.float32]
    excluded_ordinals: NDArray[np.int64]
    k: int
    metric: Metric


@dataclass(slots=True, eq=False)
class _Evaluation:
    """Evaluation of one filter over one generation's items in a thread, shared by all waiting requests."""

    filtering: Filtering
    """Keeps the object alive, because its `id()` is the key."""
    thread_future: "Future[FilterMask]"
    mask_future: "asyncio.Future[FilterMask]"
    waiting_count: int = 0
    """Number of waiting requests."""


class FilterEvaluator:
    """Evaluator of requests' filters in threads, whose number bounds the concurrent work.

    `search_executor` searches by vectors, `mask_executor` evaluates filters. They run nothing else: a flood of filters
    must not delay a blocklist or a revocation. Without executors all work is done on the event loop. Searches and
    costly filters must be admitted by `admit_work`, like inputs of the model.
    """

    def __init__(
        self,
        search_executor: Executor | None = None,
        admit_work: Callable[[], bool] = lambda: True,
        monotonic_clock: Callable[[], float] = time.monotonic,
        *,
        mask_executor: Executor | None = None,
    ) -> None:
        self.admit_work = admit_work
        self._search_executor = search_executor
        self._mask_executor = mask_executor
        self._monotonic_clock = monotonic_clock
        self._evaluations: dict[tuple[int, bytes | str], _Evaluation] = {}

    async def apply(self, served: ServedGenerations, cases: Sequence[PendingAnswer], context: RequestContext) -> None:
        """Evaluate the filter and the re-ranking in each held generation.

        Raises Problem for a filter or re-ranking that the live generation does not support.
        """
        options = context.options
        option_name = "rerank" if options.filter is None else "filter"
        for pending_answer in cases:
            if pending_answer.table.kind != "topk":
                raise unprocessable(
                    f"invalid_{option_name}",
                    f"{pending_answer.table.name} has no lists: {option_name} is only for tables with lists",
                    option_name,
                )
            if pending_answer.table.is_facet and options.filter is not None:
                raise unprocessable(
                    "invalid_filter",
                    f"{pending_answer.table.name} is a facet, whose values have no vector for a search: use another "
                    "table",
                    "filter",
                )
        await self._set_mask_and_reranker(served.live, context)
        if served.previous is not None:
            # The previous generation may lack the attributes; then it does not answer.
            with contextlib.suppress(Problem):
                await self._set_mask_and_reranker(served.previous, context)

    async def _set_mask_and_reranker(self, snapshot: Snapshot, context: RequestContext) -> None:
        options = context.options
        if options.filter is not None:
            context.set_filter_mask(snapshot, await self._passing_mask(snapshot, options.filter, context.deadline_at))
        reranker = await self.reranker(snapshot, options.rerank, context.deadline_at)
        if reranker is not None:
            context.set_reranker(snapshot, reranker)

    async def reranker(self, snapshot: Snapshot, reranking: Reranking | None, deadline_at: float) -> Reranker | None:
        """Return the re-ranker of a generation's items, None without a re-ranking.

        Raises Problem if the generation does not support it, or if it is not ready by `deadline_at` (monotonic).
        """
        if reranking is None:
            return None
        try:
            return await self._build_reranker(snapshot, reranking, deadline_at)
        except InvalidFilter as error:
            raise problem_from_input(error, "rerank") from error

    async def _build_reranker(self, snapshot: Snapshot, reranking: Reranking, deadline_at: float) -> Reranker:
        boost_masks = []
        for boost_index, boost in enumerate(reranking.boosts):
            try:
                boost_masks.append(await self._get_or_evaluate(snapshot, boost.filter, deadline_at))
            except InvalidFilter as error:
                raise with_error_path(error, f"boost[{boost_index}].filter") from error
        filtering = snapshot.part(Filtering)
        attributes = None if filtering is None else filtering.attributes
        return Reranker(reranking, tuple(boost_masks), attributes, snapshot.items.vectors)

    async def evaluate(
        self, snapshot: Snapshot, filter_or_name: Filter | str | None, deadline_at: float
    ) -> FilterMask | None:
        """Return the mask of a generation's items that pass, None without a filter.

        Raises Problem if the generation does not support it, or if it is not ready by `deadline_at` (monotonic).
        """
        return None if filter_or_name is None else await self._passing_mask(snapshot, filter_or_name, deadline_at)

    async def _passing_mask(self, snapshot: Snapshot, filter_or_name: Filter | str, deadline_at: float) -> FilterMask:
        try:
            return await self._get_or_evaluate(snapshot, filter_or_name, deadline_at)
        except InvalidFilter as error:
            raise problem_from_input(error, "filter") from error

    async def _get_or_evaluate(
        self, snapshot: Snapshot, filter_or_name: Filter | str, deadline_at: float
    ) -> FilterMask:
        filtering = snapshot.part(Filtering)
        if filtering is None:
            if isinstance(filter_or_name, str):
                raise unknown_filter_error(filter_or_name)
            raise UnknownAttribute(
                "items of this generation have no attributes: set [sources] item_attributes for the next night",
                attributes={},
            )
        if (filter_mask := filtering.get_cached(filter_or_name)) is not None:
            return filter_mask
        if self._mask_executor is None or filtering.evaluation_cost(filter_or_name) <= _INLINE_COMPARISONS_MAX:
            return filtering.evaluate(filter_or_name)
        return await self._evaluate_in_thread(self._mask_executor, filtering, filter_or_name, deadline_at)

    async def _evaluate_in_thread(
        self, mask_executor: Executor, filtering: Filtering, filter_or_name: Filter | str, deadline_at: float
    ) -> FilterMask:
        """Return the filter's mask, evaluated once for all concurrent requests; raise Problem after `deadline_at`."""
        evaluation_key = (
            id(filtering),
            filter_or_name if isinstance(filter_or_name, str) else filter_or_name.canonical_bytes,
        )
        evaluation = self._evaluations.get(evaluation_key)
        if evaluation is None:
            if len(self._evaluations) >= WAITING_FILTERS_MAX or not self.admit_work():
                raise _overloaded()
            thread_future = mask_executor.submit(filtering.evaluate, filter_or_name)
            evaluation = _Evaluation(filtering, thread_future, asyncio.wrap_future(thread_future))
            self._evaluations[evaluation_key] = evaluation
            evaluation.mask_future.add_done_callback(lambda outcome: self._finish_evaluation(evaluation_key, outcome))
        evaluation.waiting_count += 1
        try:
            timeout_s = max(0.0, deadline_at - self._monotonic_clock())
            await asyncio.wait({evaluation.mask_future}, timeout=timeout_s)
        finally:
            evaluation.waiting_count -= 1
            if not evaluation.waiting_count and evaluation.thread_future.cancel():
                # No request waits and it has not started; a started evaluation goes on, and its mask is cached.
                self._evaluations.pop(evaluation_key, None)
        if not evaluation.mask_future.done() or evaluation.mask_future.cancelled():
            raise _overloaded()
        return evaluation.mask_future.result()

    def _finish_evaluation(
        self, evaluation_key: tuple[int, bytes | str], mask_future: "asyncio.Future[FilterMask]"
    ) -> None:
        evaluation = self._evaluations.get(evaluation_key)
        if evaluation is not None and evaluation.mask_future is mask_future:
            del self._evaluations[evaluation_key]
        if not mask_future.cancelled():
            mask_future.exception()  # retrieve the error even if no request waits any more

    async def search(
        self, snapshot: Snapshot, filter_mask: FilterMask, searches: Sequence[VectorSearch], deadline_at: float
    ) -> list[SearchResult] | None:
        """Search the best passing items for each vector, in order; None if not done by `deadline_at` (monotonic)."""
        filtering = snapshot.part(Filtering)
        assert filtering is not None  # noqa: S101 - something passes

        def search_all() -> list[SearchResult] | None:
            search_results = []
            for vector_search in searches:
                if self._monotonic_clock() > deadline_at:  # no request waits any more
                    return None
                search_results.append(
                    filtering.search(
                        vector_search.query_vector,
                        filter_mask,
                        vector_search.excluded_ordinals,
                        vector_search.k,
                        vector_search.metric,
                    )
                )
            return search_results

        is_short = filter_mask.passing_count * len(searches) <= _INLINE_VECTORS_MAX
        if self._search_executor is None or is_short:
            return search_all()
        search_future = asyncio.get_running_loop().run_in_executor(self._search_executor, search_all)
        finished_futures, _ = await asyncio.wait(
            {search_future}, timeout=max(0.0, deadline_at - self._monotonic_clock())
        )
        if not finished_futures:
            search_future.cancel()  # has an effect only if it has not started
            return None
        return search_future.result()


def _overloaded() -> Problem:
    problem_message = (
        "the filter could not be evaluated in time: send the request again later, with a longer deadline_ms, or "
        "with fewer comparisons"
    )
    return Problem(503, "overloaded", problem_message, field="filter")


class SourcedVector(NamedTuple):
    """Vector of an entity, its source, and the reason why it is not a stored vector."""

    entity_vector: NDArray[np.float32]
    source: Source
    producer: str
    reason: MissReason | None
    answer_flags: Mapping[str, bool] = MappingProxyType({})
    """Answer fields that are true because of how the vector was computed."""


class FilteredLookup(ListShaper):
    """Lookup of the items that pass the request's filter, in the order of its re-ranking.

    The hook `shape` of one namespace; all namespaces share the process's `filter_evaluator`.
    """

    def __init__(self, ladder: Ladder, filter_evaluator: FilterEvaluator) -> None:
        self._ladder = ladder
        self._filter_evaluator = filter_evaluator

    async def lookup(
        self, served: ServedGenerations, request: LookupRequest, request_started_at: float
    ) -> list[AnswerJson]:
        """Answer each entity once, in order, from the generations captured in `served` when the request came."""
        served = served.pin_generation(request.options.generation)
        cases = await build_pending_answers(served.live, request)
        context = RequestContext.of(request.options, request_started_at)
        for pending_answer in cases:
            pending_answer.forbids_near_answer = True
        await self._filter_evaluator.apply(served, cases, context)
        await self._ladder.resolve(served, cases, context)
        if unanswered_cases := [case for case in cases if case.answer is None]:
            await self._search_for_partial(served, unanswered_cases, context)
        return [case.answer for case in cases if case.answer is not None]

    def cached_mask(self, snapshot: Snapshot, options: RequestOptions) -> FilterMask | None:
        """Return the mask of the items that pass the filter if it is cached, else None."""
        filtering = snapshot.part(Filtering)
        if filtering is None or options.filter is None:
            return None
        return filtering.get_cached(options.filter)

    def filter_mask(
        self, snapshot: Snapshot, options: RequestOptions, deadline_at: float
    ) -> Awaitable[FilterMask | None]:
        """Evaluate the filter of a request: see `FilterEvaluator.evaluate`."""
        return self._filter_evaluator.evaluate(snapshot, options.filter, deadline_at)

    def reranker(self, snapshot: Snapshot, options: RequestOptions, deadline_at: float) -> Awaitable[Reranker | None]:
        """Create the re-ranker of a request: see `FilterEvaluator.reranker`."""
        return self._filter_evaluator.reranker(snapshot, options.rerank, deadline_at)

    async def _search_for_partial(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Search passing items for partial lists; without a vector or under overload answer with the partial list."""
        snapshot = served.live
        filter_mask = context.filter_mask(snapshot)
        admitted_cases = [case for case in cases if self._try_admit(case)]
        entity_vectors = await self._vectors_of(served, admitted_cases, context)
        pending_vectors = [
            (case, entity_vector)
            for case, entity_vector in zip(admitted_cases, entity_vectors, strict=True)
            if entity_vector
        ]
        if pending_vectors and filter_mask is not None:
            searches = [
                _search_of(case, snapshot, entity_vector.entity_vector, context)
                for case, entity_vector in pending_vectors
            ]
            search_results = await self._filter_evaluator.search(snapshot, filter_mask, searches, context.deadline_at)
            pacer = YieldPacer(context.options)
            for (case, entity_vector), search_result in zip(pending_vectors, search_results or (), strict=False):
                await pacer.count_entity(case.entity)
                case.reason = entity_vector.reason
                # The vector includes the newer events, or is not affected by events, and the events' items are
                # excluded.
                case.is_settled_for_stored = bool(entity_vector.answer_flags)
                self._ladder.answer_builder.answer_from_search(
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

    def _try_admit(self, case: PendingAnswer) -> bool:
        if self._filter_evaluator.admit_work():
            return True
        case.live_failure_reason = LiveReason.OVERLOADED
        return False

    async def _vectors_of(
        self, served: ServedGenerations, cases: Sequence[PendingAnswer], context: RequestContext
    ) -> list[SourcedVector | None]:
        """Return the vectors of the entities, in order; None for an entity without a vector of the live generation."""
        snapshot = served.live
        entity_vectors: list[SourcedVector | None] = [None] * len(cases)
        user_indices = [index for index, case in enumerate(cases) if case.table.entity == "user"]
        for case_index, case in enumerate(cases):
            if (ordinal := case.own_ordinal) is not None:
                source = Source.LIVE if case.hit is None else Source(case.hit.tier)
                entity_vectors[case_index] = SourcedVector(
                    snapshot.items.vectors[ordinal], source, "batch",
                    case.reason if case.hit is None else None,
                )  # fmt: skip
        if user_indices:
            vector_table = user_vector_table(snapshot).name
            entities = tuple(cases[index].entity.with_table(vector_table) for index in user_indices)
            options = replace(context.options, k=None, filter=None, rerank=None, exclude=())
            vector_cases = await build_pending_answers(snapshot, LookupRequest(entities, options))
            for case_index, vector_case in zip(user_indices, vector_cases, strict=True):
                vector_case.forbids_near_answer = True
                self._ladder.newer_inputs.copy_newer_input(snapshot, vector_case, cases[case_index])
            vector_context = RequestContext.of(options, context.request_started_at, is_part_of_answer=True)
            vector_answers = await self._ladder.resolve(served, vector_cases, vector_context)
            for case_index, vector_case, answer in zip(user_indices, vector_cases, vector_answers, strict=True):
                if answer["vector"] is not None and answer["generation"] == snapshot.generation:
                    flag_fields = {"approximate": True} if answer.get("approximate") else {}
                    entity_vectors[case_index] = SourcedVector(
                        answer["vector"], answer["source"], answer["producer"],
                        answer.get("reason"), flag_fields,
                    )  # fmt: skip
                elif cases[case_index].live_failure_reason is None:
                    cases[case_index].live_failure_reason = vector_case.live_failure_reason
        return entity_vectors


def _search_of(
    case: PendingAnswer, snapshot: Snapshot, query_vector: NDArray[np.float32], context: RequestContext
) -> VectorSearch:
    """Build a search that excludes the list's exclusions; for a re-ranking, as many items as a stored list has."""
    k = case.k if context.options.rerank is None else case.table.layout.width
    return VectorSearch(
        query_vector, left_out_ordinals(case, snapshot, context), k, ranking_metric(snapshot, case.table)
    )
