"""A batch of any length: several requests at once where it is too long for one, and still one generation."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from serving.answers.fields import Answer
from serving.answers.sources import Source
from serving.client.answers import read_answers
from serving.client.arrow import read_arrow_answers
from serving.client.calls import IdsOrEntities, Options, build_post, many_binary, split
from serving.client.errors import GenerationGone
from serving.client.sender import Policy, Sender

_T = TypeVar("_T")
_Works = list[Coroutine[Any, Any, list[Answer]]]


async def lookup_batch(
    sender: Sender,
    policy: Policy,
    table: str | None,
    entities: IdsOrEntities,
    options: Options,
    deadline_at: float,
    *,
    binary: bool = False,
) -> list[Answer]:
    """The answers, in order; each request has the whole of the deadline. Raises Unanswered, for all of the batch.

    `binary` counts where one table is asked.
    """
    parts = list(split(entities, options, policy.max_batch, policy.max_ids, policy.max_numbers))
    request_slots = asyncio.Semaphore(policy.at_once)

    async def send_part(part: IdsOrEntities, options: Options) -> list[Answer]:
        if binary and table is not None:
            call, read = many_binary(table, part, options), read_arrow_answers
        else:
            call, read = build_post(table, part, options), read_answers
        async with request_slots:
            return read(await sender.send(call, deadline_at), len(part))

    answered = await _all([send_part(part, options) for part in parts])
    generations = [_generation(part_answers) for part_answers in answered]

    def repeat_parts(generation: str) -> _Works:
        return [
            _resolved(part_answers)
            if name in (generation, None)
            else send_part(part, options.pinned(generation))
            for part, part_answers, name in zip(parts, answered, generations, strict=True)
        ]

    distinct_generations = sorted(
        {generation_id for generation_id in generations if generation_id is not None}
    )
    if len(distinct_generations) > 1:
        answered = await _agreed(distinct_generations, repeat_parts)
    return [answer for part_answers in answered for answer in part_answers]


def _generation(answers: Sequence[Answer]) -> str | None:
    """Generation that one request was answered from; None if each of its answers was the previous one's."""
    return next((answer.generation for answer in answers if answer.source != Source.PREVIOUS), None)


async def _agreed(
    generations: Sequence[str], repeat_parts: Callable[[str], _Works]
) -> list[list[Answer]]:
    """Answers all of a batch from one of these generations, oldest first, after a flip fell between its requests.

    The older one is what replicas on both sides of the flip hold. Raises GenerationGone when none holds any.
    """
    *older_generations, last = generations
    for generation in older_generations:
        try:
            return await _all(repeat_parts(generation))
        except GenerationGone:
            continue
    return await _all(repeat_parts(last))


async def _resolved(ready_result: _T) -> _T:
    return ready_result


async def _all(works: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results of all `works`, in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
