"""The two clients: one for asyncio, one for threads, with the same methods."""

import ssl
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

import httpx

from serving.answers.fields import Answer, Ranking
from serving.client import calls
from serving.client.answers import (
    Generations,
    read_answer,
    read_arm,
    read_generations,
    read_ranking,
)
from serving.client.batches import lookup_batch
from serving.client.calls import Call, Entity, Id, IdsOrEntities, Options
from serving.client.events import EventReceipt, EventsCall, NewEvent, event_calls, send_events
from serving.client.loop_thread import LoopThread
from serving.client.sender import Pace, Policy, Sender

_IDLE_S = 3.0
_NONE = Options()
_POLICY = Policy()
_T = TypeVar("_T")


class AsyncClient:
    """Client for asyncio, one event loop; close it, or use it in an `async with` block.

    `binary`: what `lookup_many` is asked and answered travels as Arrow IPC streams, and comes out the same.
    `verify` is a TLS context, the PEM file of an authority, or False to trust anybody; `transport` may be an
    application in this process.
    Raises ValueError for a URL that names no HTTP server and for a token that no header can carry.
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
        http = _http(url, token, policy, verify, transport)
        self._sender = Sender(http, policy, self._pace)

    async def lookup(self, table: str, entity: Id, options: Options = _NONE) -> Answer:
        """Looks up one entity by id."""
        call = calls.build_get(table, entity, options)
        return read_answer(await self._sender.send(call, self._deadline(options)))

    async def lookup_many(
        self, table: str, entities: IdsOrEntities, options: Options = _NONE
    ) -> list[Answer]:
        """Looks up any number of entities of one table, answered in order from one generation (but for `previous`)."""
        return await self._lookup(table, entities, options)

    async def lookup_tables(
        self, entities: Sequence[Entity], options: Options = _NONE
    ) -> list[Answer]:
        """Looks up entities that each name their table, answered in order from one generation (but for `previous`)."""
        return await self._lookup(None, entities, options)

    async def score(
        self, user: Id | Entity, items: Sequence[Id], options: Options = _NONE
    ) -> Ranking:
        """Ranks a user's candidates, at most as many as the service takes in one request."""
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
        """Reports what came of answers, by generation, canary key or arm (`EXPERIMENT=ARM`); the arm it counts for.

        Sent again only if it certainly never left: after any other error it may have been counted.
        """
        call = calls.feedback(event, generation, canary_key, arm, count)
        return read_arm(await self._sender.send(call, self._deadline(_NONE)))

    async def send_events(
        self, events: Sequence[NewEvent], *, deadline_ms: float | None = None
    ) -> EventReceipt:
        """Sends any number of events, in their order; sent again under their ids, after any error, they count once.

        `deadline_ms` is for each request: there are as many as it takes.
        """
        return await self._send_events(
            event_calls(events, self._policy.max_batch), Options(deadline_ms=deadline_ms)
        )

    async def generations(self) -> Generations:
        """Generations and state of the replica that answers."""
        call = Call("GET", "/v1/generations")
        return read_generations(await self._sender.send(call, self._deadline(_NONE)))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._sender.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _deadline(self, options: Options) -> float:
        return self._pace.timer() + _within_s(self._policy, options)

    async def _send_events(self, calls: Sequence[EventsCall], options: Options) -> EventReceipt:
        return await send_events(self._sender, calls, lambda: self._deadline(options))

    async def _lookup(
        self, table: str | None, entities: IdsOrEntities, options: Options
    ) -> list[Answer]:
        deadline_at = self._deadline(options)
        return await lookup_batch(
            self._sender, self._policy, table, entities, options, deadline_at, binary=self._binary
        )


class Client:
    """Client for callers without an event loop, any number of threads; close it, or use it in a `with` block.

    Its requests run in one thread of its own, so that a deadline holds for all of a call and not for each read.
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
        """Looks up one entity by id."""
        return self._run(self._client.lookup(table, entity, options), options)

    def lookup_many(
        self, table: str, entities: IdsOrEntities, options: Options = _NONE
    ) -> list[Answer]:
        """Looks up any number of entities of one table, answered in order from one generation (but for `previous`)."""
        return self._run(self._client.lookup_many(table, entities, options), options)

    def lookup_tables(self, entities: Sequence[Entity], options: Options = _NONE) -> list[Answer]:
        """Looks up entities that each name their table, answered in order from one generation (but for `previous`)."""
        return self._run(self._client.lookup_tables(entities, options), options)

    def score(self, user: Id | Entity, items: Sequence[Id], options: Options = _NONE) -> Ranking:
        """Ranks a user's candidates, at most as many as the service takes in one request."""
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
        """Reports what came of answers, as `AsyncClient.feedback` does; the arm that it was counted for, if any."""
        work = self._client.feedback(
            event, generation=generation, canary_key=canary_key, arm=arm, count=count
        )
        return self._run(work, _NONE)

    def send_events(
        self, events: Sequence[NewEvent], *, deadline_ms: float | None = None
    ) -> EventReceipt:
        """Sends any number of events, as `AsyncClient.send_events` does."""
        options = Options(deadline_ms=deadline_ms)
        calls = event_calls(events, self._policy.max_batch)
        return self._thread.run(
            self._client._send_events(calls, options), _within_s(self._policy, options) * len(calls)
        )

    def generations(self) -> Generations:
        """Generations and state of the replica that answers."""
        return self._run(self._client.generations(), _NONE)

    def close(self) -> None:
        """Ends the calls that run and closes the connections."""
        self._thread.close(self._client.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _T], options: Options) -> _T:
        return self._thread.run(work, _within_s(self._policy, options))


def _http(
    url: str,
    token: str | None,
    policy: Policy,
    verify: ssl.SSLContext | str | bool,
    transport: httpx.AsyncBaseTransport | None,
) -> httpx.AsyncClient:
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}") from error
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"{url!r} names no HTTP server; it begins with http:// or https://")
    if token is not None and (
        not token.isprintable() or any(character.isspace() for character in token)
    ):
        raise ValueError("a token is printable characters without spaces")
    if isinstance(verify, str):
        verify = ssl.create_default_context(cafile=verify)
    headers = {} if token is None else {b"Authorization": f"Bearer {token}".encode()}
    return httpx.AsyncClient(
        base_url=base,
        headers=headers,
        verify=verify if base.scheme == "https" else False,  # certificates take long to load
        transport=transport,
        # The deadline of the call ends whatever takes too long; only a host that swallows packets is given up earlier.
        timeout=httpx.Timeout(None, connect=policy.connect_ms / 1000),
        limits=httpx.Limits(
            max_connections=policy.connections,
            max_keepalive_connections=policy.connections,
            # Before the service hangs up (5 s): feedback on a connection that just ended could not be sent again.
            keepalive_expiry=_IDLE_S,
        ),
        trust_env=False,  # a proxy to the world is no way to a service next door
    )


def _within_s(policy: Policy, options: Options) -> float:
    return (policy.deadline_ms if options.deadline_ms is None else options.deadline_ms) / 1000
