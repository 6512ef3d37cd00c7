"""The clients for asyncio and for threads, with batches of any length and events in order."""

import asyncio
import os
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Self, TypeVar

import httpx

from serving.client import calls
from serving.client.answers import (
    EventReceipt,
    Generations,
    read_answer,
    read_answers,
    read_arm,
    read_arrow_answers,
    read_generations,
    read_ranking,
    read_receipt,
)
from serving.client.calls import (
    Call,
    Entity,
    EventsCall,
    Id,
    IdsOrEntities,
    NewEvent,
    Options,
    build_post,
    event_calls,
    many_binary,
    split,
)
from serving.client.errors import DeadlineExceeded, GenerationGone
from serving.client.sender import Pace, Policy, Sender
from serving.requests.answers import Answer, Ranking, Source

_T = TypeVar("_T")

_PartCoroutines = list[Coroutine[Any, Any, list[Answer]]]

_GRACE_S = 5.0
"""Seconds that a thread waits for the loop's thread beyond a call's deadline, and that `close` may take."""

_IDLE_S = 3.0

_NONE = Options()

_POLICY = Policy()


class AsyncClient:
    """Client for asyncio and one event loop; close it, or use it in an `async with` block.

    `binary`: `lookup_many` sends and receives Arrow IPC streams; the results are the same. `verify` is a TLS context,
    the PEM file of an authority, or False to accept any certificate. `transport` may be an application in this process.
    Raises ValueError for a malformed URL and for a token that cannot be sent in a header.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        policy: Policy = _POLICY,
        binary: bool = False,
        pace: Pace | None = None,
        verify: ssl.SSLContext | str | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._policy, self._binary = policy, binary
        self._pace = pace or Pace()
        http = _create_http_client(url, token, policy, verify, transport)
        self._sender = Sender(http, policy, self._pace)

    async def lookup(self, table: str, entity: Id, options: Options = _NONE) -> Answer:
        """Look up one entity by id."""
        call = calls.build_get(table, entity, options)
        return read_answer(await self._sender.send(call, self._deadline(options)))

    async def lookup_many(self, table: str, entities: IdsOrEntities, options: Options = _NONE) -> list[Answer]:
        """Look up entities of one table; return answers in order, from one generation except those from `previous`."""
        return await self._lookup(table, entities, options)

    async def lookup_tables(self, entities: Sequence[Entity], options: Options = _NONE) -> list[Answer]:
        """Look up entities of several tables; return answers in order, from one generation except `previous` ones."""
        return await self._lookup(None, entities, options)

    async def score(self, user: Id | Entity, items: Sequence[Id], options: Options = _NONE) -> Ranking:
        """Rank a user's candidates, at most as many as the service accepts in one request."""
        call = calls.score(user, items, options)
        return read_ranking(await self._sender.send(call, self._deadline(options)))

    async def feedback(
        self,
        event: str,
        *,
        generation: str | None = None,
        canary_key: Id | None = None,
        arm: str | None = None,
        count: int = 1,
    ) -> str | None:
        """Send feedback by generation, canary key or arm (`EXPERIMENT=ARM`); return the arm it counted for, if any.

        It is retried only if it was certainly not sent: after any other error it may have been counted.
        """
        call = calls.feedback(event, generation, canary_key, arm, count)
        return read_arm(await self._sender.send(call, self._deadline(_NONE)))

    async def send_events(self, events: Sequence[NewEvent], *, deadline_ms: float | None = None) -> EventReceipt:
        """Send any number of events, in order; events sent again with the same ids after an error count once.

        `deadline_ms` is for each of the requests, of which a long list needs several.
        """
        return await self._send_events(event_calls(events, self._policy.max_batch), Options(deadline_ms=deadline_ms))

    async def generations(self) -> Generations:
        """Return the generations and state of the replica that answers."""
        call = Call("GET", "/v1/generations")
        return read_generations(await self._sender.send(call, self._deadline(_NONE)))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._sender.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _deadline(self, options: Options) -> float:
        return self._pace.timer() + _deadline_s(self._policy, options)

    async def _send_events(self, calls: Sequence[EventsCall], options: Options) -> EventReceipt:
        return await send_events(self._sender, calls, lambda: self._deadline(options))

    async def _lookup(self, table: str | None, entities: IdsOrEntities, options: Options) -> list[Answer]:
        deadline_at = self._deadline(options)
        return await lookup_batch(
            self._sender, self._policy, table, entities, options, deadline_at, binary=self._binary
        )


class Client:
    """Client for callers without an event loop, for any number of threads; close it, or use it in a `with` block.

    Its requests run in one separate thread, so that a deadline applies to a whole call and not to each read.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        policy: Policy = _POLICY,
        binary: bool = False,
        pace: Pace | None = None,
        verify: ssl.SSLContext | str | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._policy = policy
        self._client = AsyncClient(
            url, token=token, policy=policy, binary=binary, pace=pace, verify=verify,
            transport=transport,
        )  # fmt: skip
        self._thread = LoopThread()

    def lookup(self, table: str, entity: Id, options: Options = _NONE) -> Answer:
        """Look up one entity by id."""
        return self._run(self._client.lookup(table, entity, options), options)

    def lookup_many(self, table: str, entities: IdsOrEntities, options: Options = _NONE) -> list[Answer]:
        """Look up entities of one table; return answers in order, from one generation except those from `previous`."""
        return self._run(self._client.lookup_many(table, entities, options), options)

    def lookup_tables(self, entities: Sequence[Entity], options: Options = _NONE) -> list[Answer]:
        """Look up entities of several tables; return answers in order, from one generation except `previous` ones."""
        return self._run(self._client.lookup_tables(entities, options), options)

    def score(self, user: Id | Entity, items: Sequence[Id], options: Options = _NONE) -> Ranking:
        """Rank a user's candidates, at most as many as the service accepts in one request."""
        return self._run(self._client.score(user, items, options), options)

    def feedback(
        self,
        event: str,
        *,
        generation: str | None = None,
        canary_key: Id | None = None,
        arm: str | None = None,
        count: int = 1,
    ) -> str | None:
        """Send feedback, as `AsyncClient.feedback` does; return the arm that it was counted for, if any."""
        work = self._client.feedback(event, generation=generation, canary_key=canary_key, arm=arm, count=count)
        return self._run(work, _NONE)

    def send_events(self, events: Sequence[NewEvent], *, deadline_ms: float | None = None) -> EventReceipt:
        """Send any number of events, as `AsyncClient.send_events` does."""
        options = Options(deadline_ms=deadline_ms)
        calls = event_calls(events, self._policy.max_batch)
        return self._thread.run(
            self._client._send_events(calls, options), _deadline_s(self._policy, options) * len(calls)
        )

    def generations(self) -> Generations:
        """Return the generations and state of the replica that answers."""
        return self._run(self._client.generations(), _NONE)

    def close(self) -> None:
        """Cancel running calls and close the connections."""
        self._thread.close(self._client.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _T], options: Options) -> _T:
        return self._thread.run(work, _deadline_s(self._policy, options))


class LoopThread:
    """Thread with an event loop that runs coroutines for any number of threads, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._is_closed = False
        # A daemon: a client that was not closed does not keep the program from ending.
        self._thread = threading.Thread(target=self._loop.run_forever, name="larder-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T], within_s: float) -> _T:
        """Return the result of `work`, which ends within `within_s`. Raise RuntimeError after `close` or a fork."""
        with self._closing:  # `close` cancels what was started before
            if self._is_closed or self._pid != os.getpid():
                work.close()
                raise RuntimeError(
                    "this client is closed: create another one"
                    if self._is_closed
                    else "this client was created before the process forked: create one in each process"
                )
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s + _GRACE_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {within_s:.3f} s") from error
        except CancelledError:
            raise RuntimeError("this client was closed while it waited for an answer") from None
        finally:
            future.cancel()  # Ctrl-C in this thread cancels the request in the loop's thread

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel the running coroutines, run `last`, and end the thread; later calls do nothing."""
        with self._closing:
            if self._is_closed or self._pid != os.getpid():
                last.close()
                return
            self._is_closed = True
        ending = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        try:
            ending.result(_GRACE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GRACE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
        await last


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
    """Return the answers, in order; the requests share one deadline. Raise Unanswered if any request fails.

    `binary` has an effect only if `table` is given.
    """
    entity_parts = list(split(entities, options, policy.max_batch, policy.max_ids, policy.max_numbers))
    request_slots = asyncio.Semaphore(policy.at_once)

    async def send_part(entity_part: IdsOrEntities, options: Options) -> list[Answer]:
        if binary and table is not None:
            call, read_part_answers = many_binary(table, entity_part, options), read_arrow_answers
        else:
            call, read_part_answers = build_post(table, entity_part, options), read_answers
        async with request_slots:
            return read_part_answers(await sender.send(call, deadline_at), len(entity_part))

    answers_by_part = await _gather_all([send_part(entity_part, options) for entity_part in entity_parts])
    generation_by_part = [_common_generation(part_answers) for part_answers in answers_by_part]

    def repeat_parts(generation: str) -> _PartCoroutines:
        return [
            _already_resolved(part_answers)
            if part_generation in (generation, None)
            else send_part(entity_part, options.pinned(generation))
            for entity_part, part_answers, part_generation in zip(
                entity_parts, answers_by_part, generation_by_part, strict=True
            )
        ]

    distinct_generations = sorted({generation_id for generation_id in generation_by_part if generation_id is not None})
    if len(distinct_generations) > 1:
        answers_by_part = await _answers_of_one_generation(distinct_generations, repeat_parts)
    return [answer for part_answers in answers_by_part for answer in part_answers]


def _common_generation(answers: Sequence[Answer]) -> str | None:
    """Return the generation that one request was answered from; None if all answers are from `previous`."""
    return next((answer.generation for answer in answers if answer.source != Source.PREVIOUS), None)


async def _answers_of_one_generation(
    generations: Sequence[str], repeat_parts: Callable[[str], _PartCoroutines]
) -> list[list[Answer]]:
    """Repeat a batch during which a flip occurred, so that all answers are from one generation (oldest tried first).

    Replicas before and after the flip hold the older one. Raises GenerationGone if no generation can answer the batch.
    """
    *older_generations, newest_generation = generations
    for generation in older_generations:
        try:
            return await _gather_all(repeat_parts(generation))
        except GenerationGone:
            continue
    return await _gather_all(repeat_parts(newest_generation))


async def _already_resolved(ready_result: _T) -> _T:
    return ready_result


async def _gather_all(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results of all `coroutines`, in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_events(sender: Sender, calls: Sequence[EventsCall], get_deadline: Callable[[], float]) -> EventReceipt:
    """Send events, one request after the other; `get_deadline` returns the deadline of a request that is sent now.

    Raises Unanswered; some events may have been accepted by then, so send all of them again.
    """
    receipt = EventReceipt(0, 0, (), "unknown", None)
    for first_index, call in calls:
        part_receipt = read_receipt(await sender.send(call, get_deadline()))
        moved_rejections = tuple(
            replace(rejection, index=rejection.index + first_index) for rejection in part_receipt.rejected
        )
        receipt = EventReceipt(
            receipt.accepted + part_receipt.accepted,
            receipt.repeated + part_receipt.repeated,
            receipt.rejected + moved_rejections,
            part_receipt.durability,
            part_receipt.position or receipt.position,
        )
    return receipt


def _create_http_client(
    url: str,
    token: str | None,
    policy: Policy,
    verify: ssl.SSLContext | str | bool,
    transport: httpx.AsyncBaseTransport | None,
) -> httpx.AsyncClient:
    try:
        base_url = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from error
    if base_url.scheme not in ("http", "https") or not base_url.host:
        raise ValueError(f"{url!r} must begin with http:// or https:// and name a host")
    if token is not None and (not token.isprintable() or any(character.isspace() for character in token)):
        raise ValueError("a token must be printable characters without spaces")
    if isinstance(verify, str):
        verify = ssl.create_default_context(cafile=verify)
    headers = {} if token is None else {b"Authorization": f"Bearer {token}".encode()}
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        verify=verify if base_url.scheme == "https" else False,  # loading certificates is slow
        transport=transport,
        # The call's deadline bounds everything else; `connect` gives up earlier on hosts that drop packets.
        timeout=httpx.Timeout(None, connect=policy.connect_ms / 1000),
        limits=httpx.Limits(
            max_connections=policy.connections,
            max_keepalive_connections=policy.connections,
            # Shorter than the service's limit (5 s): feedback cannot be retried if its connection was just closed.
            keepalive_expiry=_IDLE_S,
        ),
        trust_env=False,  # ignore proxy settings: the service is in the same network
    )


def _deadline_s(policy: Policy, options: Options) -> float:
    return (policy.deadline_ms if options.deadline_ms is None else options.deadline_ms) / 1000
