"""Comparison of sampled answers with what the model says of their inputs."""

from time import monotonic

import numpy as np
from numpy.typing import NDArray

from serving.engine.answer_observer import AnswerSampler
from serving.generations.served_set import ServedGenerations
from serving.quality.comparison import compare
from tests.unit.serving.world import World, ask, entity, ids


class Had:
    """Items that every user of the world had by the night."""

    def ordinals_of(self, position: int) -> NDArray[np.int64]:
        """The same of each."""
        assert position >= 0
        return np.array([4, 5], np.int64)


async def test_a_live_answer_without_what_its_user_had_by_the_night_is_as_the_model_says() -> None:
    world = World()
    live = world.snapshot(seen_items=Had())
    sampler = world.ladder.observer.sampler = AnswerSampler(1_000)
    requested_entity = entity("u3", history=ids("i3"))

    (answer,) = await world.ladder.lookup(ServedGenerations(live), ask(requested_entity, fresh=True), monotonic())
    answer_sample = sampler.next()

    assert answer["source"] == "live" and not {*world.ids([4, 5])} & {*answer["items"]}
    assert answer_sample is not None
    sample = compare(answer_sample, live, None)
    assert sample.overlap == 1.0 and sample.is_exact
