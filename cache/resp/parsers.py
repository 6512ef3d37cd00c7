"""Parsers for connections of redis-py whose replies are bounded, and the settings that give them to a client.

redis-py takes a parser's class for each connection, and makes the reader as it connects. What hiredis and redis-py can
make no reply of, such as a map whose keys are lists, is an InvalidResponse here, and so is a greeting that is no map.
"""

from typing import Any, Final, TypeVar

import hiredis
import redis
import redis.asyncio
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser, _HiredisParser
from redis.exceptions import InvalidResponse
from redis.maint_notifications import MaintNotificationsConfig
from redis.utils import check_protocol_version

from cache.resp.bounded_reader import COMMAND_REPLIES, BoundedReader
from cache.resp.reply_shapes import UNREADABLE, checked

Client = TypeVar("Client", redis.Redis, redis.asyncio.Redis)


class BoundedParser(_HiredisParser):
    """redis-py's parser of a connection without an event loop, over a bounded reader."""

    def on_connect(self, connection: Any, **settings: Any) -> None:
        """Starts to read from a connection that was just opened."""
        super().on_connect(connection, **settings)  # type: ignore[no-untyped-call]
        self._reader = _reader(self, connection)
        self._is_greeting = check_protocol_version(connection.protocol)

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """The next reply; an error reply is an exception, and not raised."""
        try:
            reply = super().read_response(*arguments, **settings)
        except UNREADABLE as error:
            raise _unreadable(error) from error
        if self._is_greeting:
            self._is_greeting = False
            _check_greeting(reply)
        return reply


class AsyncBoundedParser(_AsyncHiredisParser):
    """redis-py's parser of a connection on an event loop, over a bounded reader."""

    def on_connect(self, connection: Any) -> None:
        """Starts to read from a connection that was just opened."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._reader = _reader(self, connection)  # type: ignore[assignment]
        self._is_greeting = check_protocol_version(connection.protocol)

    async def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """The next reply; an error reply is an exception, and not raised."""
        try:
            reply = await super().read_response(*arguments, **settings)
        except UNREADABLE as error:
            raise _unreadable(error) from error
        if self._is_greeting:
            self._is_greeting = False
            _check_greeting(reply)
        return reply


def _unreadable(error: Exception) -> InvalidResponse:
    return InvalidResponse(f"a reply cannot be read ({type(error).__name__}: {error})")


def _check_greeting(reply: Any) -> None:
    """Raises WrongReply unless this is a reply to HELLO: redis-py looks for the protocol in whatever comes."""
    if not isinstance(reply, Exception):
        checked("HELLO", reply)


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


BOUNDED: Final[dict[str, Any]] = {
    "parser_class": BoundedParser,
    # With these notifications, which RESP3 turns on, a pool hands out connections on which replies are left over.
    "maint_notifications_config": MaintNotificationsConfig(enabled=False),
}
"""Settings of a pool of redis-py's whose connections have bounded replies."""

ASYNC_BOUNDED: Final[dict[str, Any]] = {"parser_class": AsyncBoundedParser}
"""The same for a pool on an event loop."""


def bound_replies(client: Client) -> Client:
    """Bounds the replies of a client that has no connection yet, and returns it."""
    settings = ASYNC_BOUNDED if isinstance(client, redis.asyncio.Redis) else BOUNDED
    client.connection_pool.connection_kwargs.update(settings)
    return client
