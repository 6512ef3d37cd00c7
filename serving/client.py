"""A thin typed client of the HTTP API, synchronous and asynchronous, on httpx."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self
from urllib.parse import quote

import httpx

Id = str | int
Entity = Id | Mapping[str, Any]
"""An id, or {"id", "history", "features"}."""


class Refusal(Exception):
    """The service gave no answer; `code` and `field` are for programs, the message for people."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {error.get('code')}: {error.get('message')}")
        self.status = status
        self.code = str(error.get("code"))
        self.field = error.get("field")
        self.details = dict(error)


@dataclass(frozen=True, slots=True)
class Answer:
    """One entity's answer; which of items/scores, vector and values is set depends on the table."""

    id: str | None
    table: str
    source: str
    generation: str
    age_seconds: float
    published_at: str
    producer: str | None = None
    reason: str | None = None
    items: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None
    short: bool = False
    vector: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None
    live: str | None = None
    dropped_history: int = 0
    stale: str | None = None
    unknown: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    unscored: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """From JSON; fields of a newer service are left out."""
        known = {each.name for each in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in body.items()
            if name in known
        }
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Options:
    """What may go with every question; None leaves a field out."""

    k: int | None = None
    exclude: tuple[Id, ...] | None = None
    deadline_ms: float | None = None
    fresh: bool | None = None
    max_age_seconds: float | None = None
    generation: str | None = None
    canary_key: Id | None = None

    def to_json(self) -> dict[str, Any]:
        """Those that are set."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) is not None
        }


_NONE = Options()


def _path(table: str, entity: Id | None = None) -> str:
    path = f"/v1/lookup/{quote(table, safe='')}"
    # "." and ".." would be taken for folders on the way.
    return path if entity is None else f"{path}/{quote(str(entity), safe='').replace('.', '%2E')}"


def _query(options: Options) -> dict[str, str | int | float | bool]:
    sent = options.to_json()
    if "exclude" in sent:
        raise ValueError("exclude goes with lookup_many, where it has room")
    return sent


def _settings(token: str | None, timeout_s: float) -> dict[str, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
    return {"headers": headers, "timeout": timeout_s}


def _read(response: httpx.Response) -> Any:
    try:
        body = response.json()
    except ValueError:
        body = {}
    if response.status_code != httpx.codes.OK:
        error = body.get("error", {"code": "http_error", "message": response.text[:200]})
        raise Refusal(response.status_code, error)
    return body


def _answers(response: httpx.Response) -> list[Answer]:
    return [Answer.of(each) for each in _read(response)["answers"]]


class LarderClient:
    """Synchronous; close it, or use it in a `with` block."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 5.0) -> None:
        self._http = httpx.Client(base_url=url, **_settings(token, timeout_s))

    def lookup(self, table: str, entity: Id, options: Options = _NONE) -> Answer:
        """One entity by id."""
        return Answer.of(_read(self._http.get(_path(table, entity), params=_query(options))))

    def lookup_many(
        self, table: str, entities: Sequence[Entity], options: Options = _NONE
    ) -> list[Answer]:
        """Up to 1,000 entities of one table, in order."""
        body = {"entities": list(entities), **options.to_json()}
        return _answers(self._http.post(_path(table), json=body))

    def lookup_tables(
        self, entities: Sequence[Mapping[str, Any]], options: Options = _NONE
    ) -> list[Answer]:
        """Entities that each name their table, all from one snapshot."""
        body = {"entities": list(entities), **options.to_json()}
        return _answers(self._http.post("/v1/lookup", json=body))

    def score(self, user: Entity, items: Sequence[Id], options: Options = _NONE) -> Answer:
        """Candidates in rank order."""
        body = {"user": user, "items": list(items), **options.to_json()}
        return Answer.of(_read(self._http.post("/v1/score", json=body)))

    def generations(self) -> dict[str, Any]:
        """What the replica holds."""
        body: dict[str, Any] = _read(self._http.get("/v1/generations"))
        return body

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLarderClient:
    """The same for asyncio; `transport` may be an application in this process."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, transport=transport, **_settings(token, timeout_s)
        )

    async def lookup(self, table: str, entity: Id, options: Options = _NONE) -> Answer:
        """One entity by id."""
        return Answer.of(_read(await self._http.get(_path(table, entity), params=_query(options))))

    async def lookup_many(
        self, table: str, entities: Sequence[Entity], options: Options = _NONE
    ) -> list[Answer]:
        """Up to 1,000 entities of one table, in order."""
        body = {"entities": list(entities), **options.to_json()}
        return _answers(await self._http.post(_path(table), json=body))

    async def lookup_tables(
        self, entities: Sequence[Mapping[str, Any]], options: Options = _NONE
    ) -> list[Answer]:
        """Entities that each name their table, all from one snapshot."""
        body = {"entities": list(entities), **options.to_json()}
        return _answers(await self._http.post("/v1/lookup", json=body))

    async def score(self, user: Entity, items: Sequence[Id], options: Options = _NONE) -> Answer:
        """Candidates in rank order."""
        body = {"user": user, "items": list(items), **options.to_json()}
        return Answer.of(_read(await self._http.post("/v1/score", json=body)))

    async def generations(self) -> dict[str, Any]:
        """What the replica holds."""
        body: dict[str, Any] = _read(await self._http.get("/v1/generations"))
        return body

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
