"""Which answers are drawn: each with the same chance, however they come."""

import random

import pytest

from cache.model.input_preparation import LiveInput
from serving.engine.answer_observer import SAMPLE_QUEUE_BYTES_MAX, SAMPLE_QUEUE_MAX, AnswerSample, AnswerSampler

PICK = AnswerSample("g1", "t", b"u1", "l1", "batch", 0.0)


def drawn(sampler: AnswerSampler, sizes: list[int]) -> list[int]:
    """Numbers of the answers that are picked, from a stream cut into batches."""
    sampled_numbers, offset = [], 0
    for size in sizes:
        sampler.countdown -= size
        if sampler.countdown < 0:
            sampled_numbers += [offset + index for index in sampler.draw_indices(size)]
        offset += size
    return sampled_numbers


def test_a_stream_cut_into_batches_gives_the_same_picks_as_one_by_one() -> None:
    rng = random.Random(3)
    sizes = [rng.choice([1, 1, 1, 100, 7]) for _ in range(2_000)]

    batched_numbers = drawn(AnswerSampler(10, random.Random(5)), sizes)

    assert batched_numbers == drawn(AnswerSampler(10, random.Random(5)), [1] * sum(sizes))


@pytest.mark.parametrize("per_mille", [1.0, 10.0, 250.0])
def test_the_share_is_what_was_asked_for(per_mille: float) -> None:
    total = 400_000
    sampled_count = len(drawn(AnswerSampler(per_mille, random.Random(1)), [100] * (total // 100)))

    expected_share = per_mille / 1000
    assert abs(sampled_count - total * expected_share) < 5 * (total * expected_share * (1 - expected_share)) ** 0.5


def test_all_or_none() -> None:
    assert drawn(AnswerSampler(1_000), [3, 1, 2]) == [0, 1, 2, 3, 4, 5]
    assert drawn(AnswerSampler(0), [1_000_000] * 10) == []


def test_a_full_queue_drops_and_counts() -> None:
    sampler = AnswerSampler(1_000)
    for _ in range(SAMPLE_QUEUE_MAX + 7):
        sampler.put(PICK)

    assert (len(sampler), sampler.sampled_count, sampler.dropped_count) == (SAMPLE_QUEUE_MAX, SAMPLE_QUEUE_MAX, 7)
    assert sampler.next() == PICK and len(sampler) == SAMPLE_QUEUE_MAX - 1
    sampler.clear()
    assert sampler.next() is None


def test_what_waits_is_bounded_in_bytes_not_only_in_number() -> None:
    sampler = AnswerSampler(1_000.0)
    history = tuple(b"an item with quite a long id %d" % at for at in range(10_000))
    large = PICK._replace(caller_input=LiveInput(history))
    wide = PICK._replace(caller_input=LiveInput(None, {"age": 3, "embedding": (0.5,) * 8_192}))
    assert large.size_bytes > 900_000 and wide.size_bytes > 8_192 * 32

    for _ in range(SAMPLE_QUEUE_MAX):
        sampler.put(large)

    queued_count = len(sampler)
    assert queued_count * large.size_bytes < SAMPLE_QUEUE_BYTES_MAX + large.size_bytes
    assert sampler.dropped_count == SAMPLE_QUEUE_MAX - queued_count
    while sampler.next():
        pass
    assert sampler.has_room_for_sample()
    for _ in range(SAMPLE_QUEUE_MAX):
        sampler.put(PICK)
    assert len(sampler) == SAMPLE_QUEUE_MAX
    sampler.clear()
    assert sampler.has_room_for_sample()
