"""Typed Python client of the HTTP API, synchronous and asynchronous, based on httpx.

    with Client("http://larder:8000", policy=Policy(deadline_ms=100)) as larder:
        answer = larder.lookup("user_topk", "u-1", Options(k=20))

Each failed call raises a subclass of Unanswered: InvalidArgument before anything is sent, DeadlineExceeded,
Unreachable, Garbled, or a Refusal with the service's own code (InvalidRequest, Unauthorized, TokenExpired, Forbidden,
GenerationGone, Unavailable, QuotaExceeded).
"""

try:
    import httpx as _httpx  # noqa: F401
except ModuleNotFoundError:
    from cache.process.command_line import install_command as _install_command

    raise ModuleNotFoundError(
        f"serving.client needs httpx, not installed here: {_install_command('client')}", name="httpx"
    ) from None

from serving.client.answers import EventReceipt, EventRejection, Generations, Held
from serving.client.calls import Entity, Id, NewEvent, Options
from serving.client.clients import AsyncClient, Client
from serving.client.errors import (
    DeadlineExceeded,
    Forbidden,
    Garbled,
    GenerationGone,
    InvalidArgument,
    InvalidRequest,
    QuotaExceeded,
    Refusal,
    TokenExpired,
    Unanswered,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from serving.client.sender import Pace, Policy
from serving.requests.answers import Answer, Ranking, Source

__all__ = [
    "Answer", "AsyncClient", "Client", "DeadlineExceeded", "Entity", "EventReceipt", "EventRejection", "Forbidden",
    "Garbled", "GenerationGone", "Generations", "Held", "Id", "InvalidArgument", "InvalidRequest", "NewEvent",
    "Options", "Pace", "Policy", "QuotaExceeded", "Ranking", "Refusal", "Source", "TokenExpired", "Unanswered",
    "Unauthorized", "Unavailable", "Unreachable",
]  # fmt: skip
