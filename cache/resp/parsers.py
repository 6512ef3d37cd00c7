"""Parsers for connections of redis-py whose replies are bounded, and the settings that give them to a client.

redis-py takes a parser's class for each connection, and makes the reader as it connects.
"""

from typing import Any, Final, TypeVar

import hiredis
import redis
import redis.asyncio
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser, _HiredisParser
from redis.exceptions import InvalidResponse

from cache.resp.bounded_reader import COMMAND_REPLIES, BoundedReader

Client = TypeVar("Client", redis.Redis, redis.asyncio.Redis)


class BoundedParser(_HiredisParser):
    """redis-py's parser of a connection without an event loop, over a bounded reader."""

    def on_connect(self, connection: Any, **settings: Any) -> None:
        """Starts to read from a connection that was just opened."""
        super().on_connect(connection, **settings)  # type: ignore[no-untyped-call]
        self._reader = _reader(self, connection)


class AsyncBoundedParser(_AsyncHiredisParser):
    """redis-py's parser of a connection on an event loop, over a bounded reader."""

    def on_connect(self, connection: Any) -> None:
        """Starts to read from a connection that was just opened."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._reader = _reader(self, connection)  # type: ignore[assignment]


def _reader(parser: BoundedParser | AsyncBoundedParser, connection: Any) -> hiredis.Reader:
    settings: dict[str, Any] = {
        "protocolError": InvalidResponse,
        "replyError": parser.parse_error,
        "errors": connection.encoder.encoding_errors,
        "notEnoughData": NOT_ENOUGH_DATA,
    }
    if connection.encoder.decode_responses:
        settings["encoding"] = connection.encoder.encoding
    return BoundedReader(COMMAND_REPLIES, **settings)


BOUNDED: Final[dict[str, Any]] = {"parser_class": BoundedParser}
"""Settings of a pool of redis-py's whose connections have bounded replies."""

ASYNC_BOUNDED: Final[dict[str, Any]] = {"parser_class": AsyncBoundedParser}
"""The same for a pool on an event loop."""


def bound_replies(client: Client) -> Client:
    """Bounds the replies of a client that has no connection yet, and returns it."""
    settings = ASYNC_BOUNDED if isinstance(client, redis.asyncio.Redis) else BOUNDED
    client.connection_pool.connection_kwargs.update(settings)
    return client
