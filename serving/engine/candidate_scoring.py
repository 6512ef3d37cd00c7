"""Ranking of a caller's own candidates for one user."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.filter_mask import FilterMask
from cache.model.ranking import Metric, score
from cache.records import Layout
from serving.engine.hooks import ListShaper
from serving.engine.ladder import Ladder
from serving.engine.rendering.answer_fields import AnswerJson, Reranker, history_in
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot, ranking_metric, user_vector_table
from serving.requests.errors import Problem
from serving.requests.models import LookupRequest, ScoreRequest
from serving.requests.options import RequestOptions


async def rank_candidates(
    ladder: Ladder, served: ServedGenerations, score_request: ScoreRequest, request_started_at: float
) -> AnswerJson:
    """Rank the candidates by the user's vector, from any rung, times item vectors of the same generation.

    With a history or features the vector is computed from them, not read. `score_tolerance` bounds the effect of the
    stored vector's precision: candidates whose scores are closer than twice that may be in either order. It is 0 where
    vectors are kept as f4, which ranks as the night did.

    Candidates without a score are listed by reason: `unknown`, `blocked`, `excluded` (the sent history), `filtered`.
    """
    served = served.pin_generation(score_request.options.generation)
    request_options, shaper = score_request.options, ladder.shaper
    deadline_at = request_started_at + request_options.deadline_s
    filter_mask = await shaper.filter_mask(served.live, request_options, deadline_at)
    reranker = await shaper.reranker(served.live, request_options, deadline_at)
    if not await _can_shape_list(shaper, served.previous, request_options, deadline_at):
        served = replace(served, previous=None)  # the previous generation cannot apply the filter or re-ranking
    table = user_vector_table(served.live)
    user = score_request.user.with_table(table.name)
    lookup_options = replace(request_options, fresh=request_options.fresh or user.has_input, filter=None, rerank=None)
    lookup_request = LookupRequest((user,), lookup_options)
    # A copy: the sampler may hold the ladder's dict.
    answer = dict((await ladder.lookup(served, lookup_request, request_started_at))[0])
    snapshot = served.find(answer["generation"]) or served.live
    user_vector = answer.pop("vector")
    if snapshot is not served.live:
        filter_mask = await shaper.filter_mask(snapshot, request_options, deadline_at)
        reranker = await shaper.reranker(snapshot, request_options, deadline_at)
    ordinals, unranked_ids_by_reason = _sort_out_candidates(snapshot, score_request, filter_mask)
    answer |= {"items": [], "scores": []}
    if user_vector is not None and ordinals:
        layout = snapshot.manifest.tables[table.name].layout
        answer |= _ranking_fields(
            snapshot, layout, user_vector, np.array(ordinals, np.int64), request_options.k, reranker
        )
        if request_options.rerank is not None:
            answer["reranked"] = request_options.rerank.part_names
    elif ordinals:
        unranked_ids_by_reason["unscored"] = snapshot.items.ids_of(np.array(ordinals, np.uint32))
    return answer | unranked_ids_by_reason


async def _can_shape_list(
    shaper: ListShaper, snapshot: Snapshot | None, options: RequestOptions, deadline_at: float
) -> bool:
    """True if a generation has the attributes that the request's filter and re-ranking name."""
    if snapshot is not None:
        try:
            await shaper.filter_mask(snapshot, options, deadline_at)
            await shaper.reranker(snapshot, options, deadline_at)
        except Problem:
            return False
    return True


def _ranking_fields(
    snapshot: Snapshot,
    layout: Layout,
    user_vector: NDArray[np.float32],
    candidate_ordinals: NDArray[np.int64],
    k: int | None,
    reranker: Reranker | None,
) -> dict[str, Any]:
    metric = ranking_metric(snapshot)
    scores = score(user_vector[None, :], snapshot.items.vectors, candidate_ordinals[None, :], metric)[0]
    order = np.lexsort((candidate_ordinals, -scores))
    if reranker is not None:
        item_limit = len(order) if k is None else k
        order = order[reranker.rerank(candidate_ordinals[order].astype(np.uint32), scores[order], item_limit)]
    order = order[:k]
    return {
        "items": snapshot.items.ids_of(candidate_ordinals[order].astype(np.uint32)),
        "scores": scores[order],
        "score_tolerance": score_tolerance(layout, user_vector, snapshot.items.vectors[candidate_ordinals], metric),
    }


def score_tolerance(
    layout: Layout, user_vector: NDArray[np.float32], item_vectors: NDArray[np.float32], metric: Metric
) -> float:
    """Return the largest change that rounding the vector to its layout can have made to any of these scores."""
    if layout.precision == "f4":
        return 0.0
    magnitudes = np.abs(user_vector)
    # Half a unit in the last place of a float16 (11 bits), or half a step of the int8 scale.
    rounding_steps = (
        magnitudes * 2.0**-11 if layout.precision == "f2" else np.full_like(magnitudes, magnitudes.max() / 254)
    )
    score_changes = np.abs(item_vectors) @ rounding_steps
    if metric == "cosine":
        # The rounding of the vector's length adds as much again.
        length_products = np.linalg.norm(item_vectors, axis=1) * np.linalg.norm(user_vector)
        score_changes = 2 * score_changes / np.where(length_products == 0, 1, length_products)
    return float(score_changes.max(initial=0))


def _sort_out_candidates(
    snapshot: Snapshot, score_request: ScoreRequest, filter_mask: FilterMask | None
) -> tuple[list[int], dict[str, list[str]]]:
    history_numbers = history_in(snapshot, score_request.user.history).item_numbers
    ranked_ordinals: dict[int, None] = {}
    unranked_ids_by_reason: dict[str, list[str]] = {"unknown": [], "blocked": [], "excluded": []}
    candidate_ordinals = snapshot.items.ordinals_of(score_request.candidate_ids)
    passing_flags = [True] * len(candidate_ordinals)
    if filter_mask is not None:
        unranked_ids_by_reason["filtered"] = []
        passing_flags = filter_mask.among(np.maximum(candidate_ordinals, 0)).tolist()
    for candidate_id, ordinal, is_passing in zip(
        score_request.candidate_ids, candidate_ordinals.tolist(), passing_flags, strict=True
    ):
        if ordinal < 0:
            unranked_ids_by_reason["unknown"].append(candidate_id.decode())
        elif ordinal in snapshot.blocked_item_numbers:
            unranked_ids_by_reason["blocked"].append(candidate_id.decode())
        elif ordinal in history_numbers:
            unranked_ids_by_reason["excluded"].append(candidate_id.decode())
        elif not is_passing:
            unranked_ids_by_reason["filtered"].append(candidate_id.decode())
        else:
            ranked_ordinals[ordinal] = None
    return list(ranked_ordinals), unranked_ids_by_reason
