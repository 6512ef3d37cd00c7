"""A batch of any length: several requests at once where it is too long for one, and still one generation."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from serving.answers.fields import Answer
from serving.answers.sources import Source
from serving.client.answers import read_answers
from serving.client.arrow import read_arrow_answers
from serving.client.calls import Asked, Options, many, many_binary, split
from serving.client.errors import GenerationGone
from serving.client.sender import Policy, Sender

_T = TypeVar("_T")
_Works = list[Coroutine[Any, Any, list[Answer]]]


async def lookup_batch(
    sender: Sender,
    policy: Policy,
    table: str | None,
    entities: Asked,
    options: Options,
    until: float,
    *,
    binary: bool = False,
) -> list[Answer]:
    """The answers, in order; each request has the whole of the deadline. Raises Unanswered, for all of the batch.

    `binary` counts where one table is asked.
    """
    parts = list(split(entities, options, policy.max_batch, policy.max_ids, policy.max_numbers))
    turn = asyncio.Semaphore(policy.at_once)

    async def ask(part: Asked, options: Options) -> list[Answer]:
        if binary and table is not None:
            call, read = many_binary(table, part, options), read_arrow_answers
        else:
            call, read = many(table, part, options), read_answers
        async with turn:
            return read(await sender.send(call, until), len(part))

    answered = await _all([ask(part, options) for part in parts])
    told = [_generation(each) for each in answered]

    def again(generation: str) -> _Works:
        return [
            _done(had) if name in (generation, None) else ask(part, options.pinned(generation))
            for part, had, name in zip(parts, answered, told, strict=True)
        ]

    seen = sorted({each for each in told if each is not None})
    if len(seen) > 1:
        answered = await _agreed(seen, again)
    return [answer for each in answered for answer in each]


def _generation(answers: Sequence[Answer]) -> str | None:
    """Generation that one request was answered from; None if each of its answers was the previous one's."""
    return next((each.generation for each in answers if each.source != Source.PREVIOUS), None)


async def _agreed(seen: Sequence[str], again: Callable[[str], _Works]) -> list[list[Answer]]:
    """Answers all of a batch from one of these generations, oldest first, after a flip fell between its requests.

    The older one is what replicas on both sides of the flip hold. Raises GenerationGone when none holds any.
    """
    *others, last = seen
    for generation in others:
        try:
            return await _all(again(generation))
        except GenerationGone:
            continue
    return await _all(again(last))


async def _done(had: _T) -> _T:
    return had


async def _all(works: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results of all `works`, in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(each) for each in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
