"""Ranking a caller's own candidates: from what the vector comes, and how far its scores can be trusted."""

import asyncio

import numpy as np
import pytest

from cache.format.ids import fingerprint
from cache.records import Layout, decode_record, encode_numbers
from serving.engine.answer_observer import AnswerSampler
from serving.engine.candidate_scoring import rank_candidates, score_tolerance
from serving.filters.filtered_lookup import FilteredLookup, FilterEvaluator
from serving.generations.served_set import ServedGenerations
from serving.requests.errors import unprocessable
from serving.requests.models import ScoreRequest
from serving.requests.options import RequestOptions
from tests.unit.serving.world import GENERATION, OLDER, World, entity, ids


async def test_a_sent_history_is_computed_from_although_a_vector_is_stored() -> None:
    world = World()
    served = ServedGenerations(world.snapshot())
    candidates, options = ids("i1", "i2"), RequestOptions(5.0)

    async def ranked(user):
        score_request = ScoreRequest(user, candidates, options)
        now_s = asyncio.get_running_loop().time()
        return await rank_candidates(world.ladder, served, score_request, now_s)

    stored_answer = await ranked(entity("u1", ""))
    live = [await ranked(entity("u1", "", history=ids("i3"))) for _ in range(2)]
    world.busy = True
    settled = await ranked(entity("u1", "", history=ids("i3")))

    assert stored_answer["source"] == "l2" and stored_answer["score_tolerance"] == 0.0
    assert [answer["source"] for answer in live] == ["live"] * 2
    assert (settled["source"], settled["reason"]) == ("l1", "fresh_unavailable")


async def test_a_sampled_answer_stays_that_of_the_vector() -> None:
    # Given a service that samples each answer
    world = World()
    sampler = world.ladder.observer.sampler = AnswerSampler(1_000)
    served = ServedGenerations(world.snapshot())
    requested_user = entity("stranger", "", history=ids("i3"))

    # When candidates are scored for a history
    score_request = ScoreRequest(requested_user, ids("i1", "i2"), RequestOptions(5.0))
    await rank_candidates(world.ladder, served, score_request, asyncio.get_running_loop().time())

    # Then the sample has the vector, and not the candidates' scores
    sample = sampler.next()
    assert sample is not None and sample.answer_fields is not None
    assert "vector" in sample.answer_fields and "scores" not in sample.answer_fields


class EverythingPasses:
    """Passing items of a generation that has the filter's attribute."""

    def among(self, ordinals):
        return np.ones(len(ordinals), bool)


class FiltersOfTheLiveOne(FilterEvaluator):
    """Filters that name an attribute which the previous generation lacks."""

    async def evaluate(self, snapshot, filter_, deadline=None):
        if snapshot.generation == OLDER:
            raise unprocessable("invalid_filter", "unknown attribute 'colour'", "filter")
        return EverythingPasses()


async def test_a_previous_generation_without_the_filters_attribute_answers_no_score() -> None:
    world = World()
    live = ServedGenerations(world.snapshot(GENERATION), world.snapshot(OLDER))
    del world.remote.pages[GENERATION, "user_vector", 0]
    filtered_request = ScoreRequest(entity("u1", ""), ids("i1", "i2"), RequestOptions(5.0, filter="red"))
    unfiltered_request = ScoreRequest(filtered_request.user, filtered_request.candidate_ids, RequestOptions(5.0))
    now_s = asyncio.get_running_loop().time()

    previous = await rank_candidates(world.ladder, live, unfiltered_request, now_s)
    world.ladder.shaper = FilteredLookup(world.ladder, FiltersOfTheLiveOne())
    filtered = await rank_candidates(world.ladder, live, filtered_request, now_s)

    assert previous["source"] == "previous" and previous["items"]
    assert (filtered["source"], filtered["generation"]) == ("default", GENERATION)
    assert filtered["items"] == [] and filtered["unscored"] == ["i1", "i2"]


@pytest.mark.parametrize("precision", ["f2", "i1"])
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_no_score_is_further_off_than_the_tolerance_says(precision: str, metric: str) -> None:
    rng = np.random.default_rng(3)
    layout = Layout("vector", 32, precision)  # type: ignore[arg-type]
    items = rng.normal(size=(50, 32)).astype(np.float32)
    prints = np.array([fingerprint(b"a")], np.uint64)
    worst = 0.0
    for _ in range(50):
        exact = rng.normal(size=(1, 32)).astype(np.float32)
        raw = encode_numbers(layout, prints, exact, 0)[0].tobytes()
        stored_vector = decode_record(layout, raw).numbers

        tolerance = score_tolerance(layout, stored_vector, items, metric)  # type: ignore[arg-type]
        off = np.abs(scores(stored_vector, items, metric) - scores(exact[0], items, metric)).max()

        assert off <= tolerance * 1.01 + 1e-6
        worst = max(worst, off / tolerance)
    assert worst > 0.05, "a bound that says something"


def scores(vector, items, metric):
    item_scores = items.astype(np.float64) @ vector
    if metric == "cosine":
        item_scores /= np.linalg.norm(items, axis=1) * np.linalg.norm(vector)
    return item_scores
