"""Checks of Redis' replies: bounds before memory is allocated, and the shape required for the command."""

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import hiredis
import redis
import redis.asyncio
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser, _HiredisParser
from redis.exceptions import InvalidResponse, ResponseError
from redis.maint_notifications import MaintNotificationsConfig
from redis.utils import check_protocol_version

from cache.native import loader

Client = TypeVar("Client", redis.Redis, redis.asyncio.Redis)
ReplyCheck = Callable[[Any], bool]

UNREADABLE_REPLY_ERRORS: Final = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that Python code raises when it reads a reply of an unexpected type, UnicodeDecodeError included."""

_EXCERPT_CHARS: Final = 80
_BYTES_TYPES: Final = frozenset([bytes])
_BYTES_OR_NONE_TYPES: Final = frozenset([bytes, type(None)])
_POSITION_PATTERN: Final = re.compile(rb"[0-9]+-[0-9]+")


class ReplyBounds(NamedTuple):
    """Bounds of one reply: number of announced elements, nested ones included, and bytes of one payload."""

    elements_max: int
    payload_bytes_max: int


RECORD_REPLY_BOUNDS: Final = ReplyBounds(elements_max=1_024, payload_bytes_max=64 << 20)
"""Bounds for the read path, whose replies are one string or number; a server may push lists."""

COMMAND_REPLY_BOUNDS: Final = ReplyBounds(elements_max=1 << 20, payload_bytes_max=512 << 20)
"""Bounds for all other commands.

The longest requested list is a slot map (at most 16,384 ranges of about ten elements) or a registry; for a million
elements hiredis allocates 8 MiB. 512 MiB is the longest string that Redis stores (`proto-max-bulk-len`).
"""


def create_reply_scanner(bounds: ReplyBounds) -> Any:
    """Create a scanner for one connection's replies; call `admits(data)` before a parser receives the same bytes."""
    return loader.kernels.ReplyScanner(*bounds)


def bounds_refusal(bounds: ReplyBounds) -> str:
    """Return the error message for a connection whose replies exceed the bounds."""
    return f"a reply announces more than {bounds.elements_max} elements or {bounds.payload_bytes_max} bytes"


class BoundedReader(hiredis.Reader):
    """hiredis.Reader whose `feed` raises its `protocolError` for a reply that announces more than the bounds.

    For the 13 bytes `*2147483647\r\n`, hiredis allocates a list of 2**31 elements: 16 GiB of address space, and freeing
    it blocks the process for 9 to 24 s. For a payload (`$`) it allocates memory only as bytes arrive.
    """

    def __init__(self, bounds: ReplyBounds, **settings: Any) -> None:
        super().__init__(**settings)
        self._error_class = settings.get("protocolError", hiredis.ProtocolError)
        self._bounds = bounds
        self._scanner = create_reply_scanner(bounds)

    def feed(self, buffer: Any, start: int = 0, size: int = -1, /) -> None:
        """Add bytes from the server: all of `buffer`, or `size` of them from `start`."""
        size = size if size >= 0 else len(buffer) - start
        if not self._scanner.admits(memoryview(buffer)[start : start + size]):
            raise self._error_class(bounds_refusal(self._bounds))
        super().feed(buffer, start, size)


class BoundedParser(_HiredisParser):
    """Parser with bounded replies for redis-py's blocking connections.

    redis-py takes a parser class for each connection and creates the reader when it connects. This class raises
    InvalidResponse for a reply that hiredis and redis-py cannot convert, such as a map whose keys are lists, and for a
    greeting that is not a map.
    """

    def on_connect(self, connection: Any, **settings: Any) -> None:
        """Start to read from a newly opened connection."""
        super().on_connect(connection, **settings)  # type: ignore[no-untyped-call]
        self._reader = _bounded_reader(self, connection)
        self._is_greeting = check_protocol_version(connection.protocol)

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """Return the next reply; an error reply is returned as an exception, not raised."""
        try:
            reply = super().read_response(*arguments, **settings)
        except UNREADABLE_REPLY_ERRORS as error:
            raise _unreadable_reply_error(error) from error
        if self._is_greeting:
            self._is_greeting = False
            _check_greeting(reply)
        return reply


class AsyncBoundedParser(_AsyncHiredisParser):
    """Parser with bounded replies for redis-py's asyncio connections."""

    def on_connect(self, connection: Any) -> None:
        """Start to read from a newly opened connection."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._reader = _bounded_reader(self, connection)  # type: ignore[assignment]
        self._is_greeting = check_protocol_version(connection.protocol)

    async def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """Return the next reply; an error reply is returned as an exception, not raised."""
        try:
            reply = await super().read_response(*arguments, **settings)
        except UNREADABLE_REPLY_ERRORS as error:
            raise _unreadable_reply_error(error) from error
        if self._is_greeting:
            self._is_greeting = False
            _check_greeting(reply)
        return reply


def _unreadable_reply_error(error: Exception) -> InvalidResponse:
    return InvalidResponse(f"a reply cannot be read ({type(error).__name__}: {error})")


def _check_greeting(reply: Any) -> None:
    """Raise WrongReply unless this is a valid reply to HELLO, which redis-py does not check."""
    if not isinstance(reply, Exception):
        checked_reply("HELLO", reply)


def _bounded_reader(parser: BoundedParser | AsyncBoundedParser, connection: Any) -> hiredis.Reader:
    reader_settings: dict[str, Any] = {
        "protocolError": InvalidResponse,
        "replyError": parser.parse_error,
        "errors": connection.encoder.encoding_errors,
        "notEnoughData": NOT_ENOUGH_DATA,
    }
    if connection.encoder.decode_responses:
        reader_settings["encoding"] = connection.encoder.encoding
    return BoundedReader(COMMAND_REPLY_BOUNDS, **reader_settings)


BOUNDED_POOL_SETTINGS: Final[dict[str, Any]] = {
    "parser_class": BoundedParser,
    # With these notifications, which RESP3 enables, a pool could hand out connections with unread replies.
    "maint_notifications_config": MaintNotificationsConfig(enabled=False),
}
"""Settings of a redis-py pool whose connections have bounded replies."""

ASYNC_BOUNDED_POOL_SETTINGS: Final[dict[str, Any]] = {"parser_class": AsyncBoundedParser}
"""Settings of an asyncio redis-py pool whose connections have bounded replies."""


def bound_replies(client: Client) -> Client:
    """Bound the replies of a client that has not connected yet; return the client."""
    settings = ASYNC_BOUNDED_POOL_SETTINGS if isinstance(client, redis.asyncio.Redis) else BOUNDED_POOL_SETTINGS
    client.connection_pool.connection_kwargs.update(settings)
    return client


class WrongReply(InvalidResponse, ResponseError):
    """A reply does not have its command's shape.

    Also a ResponseError: then redis-py's pipelines read the remaining replies, so that none of them is taken for the
    reply to a later command.
    """


class ReplyShape(NamedTuple):
    """Shape of a command's reply in words, and its check per protocol version."""

    shape_in_words: str
    resp2_check: ReplyCheck
    resp3_check: ReplyCheck


def _shape(shape_in_words: str, resp2_check: ReplyCheck, resp3_check: ReplyCheck | None = None) -> ReplyShape:
    return ReplyShape(shape_in_words, resp2_check, resp2_check if resp3_check is None else resp3_check)


def _is_count(reply: Any) -> bool:
    return type(reply) is int and reply >= 0


def _is_count_or_nothing(reply: Any) -> bool:
    return reply is None or _is_count(reply)


def _is_integer(reply: Any) -> bool:
    return type(reply) is int


def _is_text(reply: Any) -> bool:
    return type(reply) is bytes


def _is_text_or_nothing(reply: Any) -> bool:
    return type(reply) is bytes or reply is None


def _is_ok(reply: Any) -> bool:
    return type(reply) is bytes and reply == b"OK"


def _is_ok_or_nothing(reply: Any) -> bool:
    return reply is None or _is_ok(reply)


def _is_pong(reply: Any) -> bool:
    return type(reply) is bytes and reply == b"PONG"


def _is_info(reply: Any) -> bool:
    # A section without fields, such as Keyspace of an empty server, consists of its heading.
    return type(reply) is bytes and (b":" in reply or reply.startswith(b"# "))


def _is_list(reply: Any) -> bool:
    return type(reply) is list


def _is_text_list(reply: Any) -> bool:
    return type(reply) is list and _BYTES_TYPES.issuperset(map(type, reply))


def _is_text_or_nothing_list(reply: Any) -> bool:
    return type(reply) is list and _BYTES_OR_NONE_TYPES.issuperset(map(type, reply))


def _is_flat_map(reply: Any) -> bool:
    return _is_text_list(reply) and len(reply) % 2 == 0


def _is_map(reply: Any) -> bool:
    return (
        type(reply) is dict
        and _BYTES_TYPES.issuperset(map(type, reply))
        and _BYTES_TYPES.issuperset(map(type, reply.values()))
    )


def _is_whole_number(element: Any) -> bool:
    # Redis sends the numbers of TIME as strings, other servers send integers.
    return _is_count(element) or (type(element) is bytes and element.isdigit())


def _is_two_numbers(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and all(map(_is_whole_number, reply))


def _is_two_counts(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and all(map(_is_count, reply))


def _is_score(element: Any) -> bool:
    if type(element) is not bytes:
        return type(element) is float or type(element) is int
    try:
        float(element)
    except ValueError:
        return False
    return True


def _is_flat_scores(reply: Any) -> bool:
    return _is_flat_map(reply) and all(map(_is_score, reply[1::2]))


def _is_scored_member(element: Any) -> bool:
    return type(element) is list and len(element) == 2 and _is_text(element[0]) and _is_score(element[1])


def _is_scored_members(reply: Any) -> bool:
    return type(reply) is list and all(map(_is_scored_member, reply))


def _is_position(element: Any) -> bool:
    return type(element) is bytes and _POSITION_PATTERN.fullmatch(element) is not None


def _is_position_or_nothing(reply: Any) -> bool:
    return reply is None or _is_position(reply)


def _is_stream_entry(element: Any) -> bool:
    # An entry without fields was deleted but is still pending for a consumer.
    return (
        type(element) is list
        and len(element) == 2
        and _is_position(element[0])
        and (element[1] is None or _is_flat_map(element[1]))
    )


def _is_stream_entries(reply: Any) -> bool:
    return type(reply) is list and all(map(_is_stream_entry, reply))


def _is_claimed_entries(reply: Any) -> bool:
    return (
        type(reply) is list
        and len(reply) >= 2
        and _is_position(reply[0])
        and type(reply[1]) is list
        and all(entry is None or _is_stream_entry(entry) for entry in reply[1])
    )


def _is_streams(reply: Any) -> bool:
    return reply is None or (
        type(reply) is list
        and all(
            type(stream) is list and len(stream) == 2 and type(stream[0]) is bytes and _is_stream_entries(stream[1])
            for stream in reply
        )
    )


def _is_map_of_streams(reply: Any) -> bool:
    return reply is None or (
        type(reply) is dict
        and all(type(name) is bytes and _is_stream_entries(entries) for name, entries in reply.items())
    )


def _is_slot_range(element: Any) -> bool:
    return (
        type(element) is list
        and len(element) >= 3
        and _is_count(element[0])
        and _is_count(element[1])
        and element[0] <= element[1] < 16_384
        and all(
            type(node) is list and len(node) >= 2 and _is_text_or_nothing(node[0]) and _is_count(node[1])
            for node in element[2:]
        )
    )


def _is_slot_map(reply: Any) -> bool:
    return type(reply) is list and all(map(_is_slot_range, reply))


def _is_list_of_commands(reply: Any) -> bool:
    return type(reply) is list and all(command_info is None or type(command_info) is list for command_info in reply)


def _is_pointer_move_result(reply: Any) -> bool:
    """True for a reply of the script that moves the pointer: a status number, and one or two texts."""
    if type(reply) is not list or not reply or not _is_text_list(reply[1:]):
        return False
    return (type(reply[0]), len(reply)) == (int, 3 if reply[0] == 2 else 2)


def _is_script_result(reply: Any) -> bool:
    return reply is None or type(reply) in (int, bytes, list)


def _is_transaction_reply(reply: Any) -> bool:
    return reply is None or type(reply) in (bytes, list)


def _is_list_of_flat_maps(reply: Any) -> bool:
    return type(reply) is list and all(map(_is_flat_map, reply))


def _is_list_of_maps(reply: Any) -> bool:
    return type(reply) is list and all(map(_is_map, reply))


def _is_stream_description(reply: Any) -> bool:
    return type(reply) is list and len(reply) % 2 == 0 and _is_text_list(reply[::2])


COUNT_SHAPE: Final = _shape("a count", _is_count)
COUNT_OR_NOTHING_SHAPE: Final = _shape("a count or nothing", _is_count_or_nothing)
INTEGER_SHAPE: Final = _shape("an integer", _is_integer)
TEXT_SHAPE: Final = _shape("a text", _is_text)
TEXT_OR_NOTHING_SHAPE: Final = _shape("a text or nothing", _is_text_or_nothing)
TEXTS_SHAPE: Final = _shape("a list of texts", _is_text_list)
OK_SHAPE: Final = _shape("OK", _is_ok)
MAP_SHAPE: Final = _shape("a map of texts", _is_flat_map, _is_map)
MEMBERS_SHAPE: Final = _shape("members of a sorted set", _is_text_list)

SCORED_MEMBERS_SHAPE: Final = _shape("members with their scores", _is_flat_scores, _is_scored_members)

ENTRIES_SHAPE: Final = _shape("entries of a stream", _is_stream_entries)
STREAMS_SHAPE: Final = _shape("streams with entries", _is_streams, _is_map_of_streams)
POINTER_MOVE_SHAPE: Final = _shape("a status number and one or two texts", _is_pointer_move_result)
SCRIPT_RESULT_SHAPE: Final = _shape("a count, a text, a list or nothing", _is_script_result)

REPLY_SHAPES: Final[Mapping[str, ReplyShape]] = {
    "CLUSTER SLOTS": _shape("a slot map", _is_slot_map),
    "COMMAND": _shape("a list of commands", _is_list_of_commands),
    "COMMAND INFO": _shape("a list of commands", _is_list_of_commands),
    "CONFIG GET": MAP_SHAPE,
    "BGREWRITEAOF": TEXT_SHAPE,
    "DEL": COUNT_SHAPE,
    "EVAL": SCRIPT_RESULT_SHAPE,
    "EVALSHA": SCRIPT_RESULT_SHAPE,
    "EXISTS": COUNT_SHAPE,
    "EXPIRE": COUNT_SHAPE,
    "FLUSHALL": OK_SHAPE,
    "GET": TEXT_OR_NOTHING_SHAPE,
    "GETRANGE": TEXT_SHAPE,
    "HDEL": COUNT_SHAPE,
    "HELLO": _shape("a map", lambda reply: type(reply) is dict),
    "HGET": TEXT_OR_NOTHING_SHAPE,
    "HGETALL": MAP_SHAPE,
    "HLEN": COUNT_SHAPE,
    "HSET": COUNT_SHAPE,
    "INCR": INTEGER_SHAPE,
    "INFO": _shape("sections of name:value", _is_info),
    "MEMORY USAGE": COUNT_OR_NOTHING_SHAPE,
    "MGET": _shape("a list of texts or nothings", _is_text_or_nothing_list),
    "PEXPIRE": COUNT_SHAPE,
    "PFADD": COUNT_SHAPE,
    "PFCOUNT": COUNT_SHAPE,
    "PING": _shape("PONG", _is_pong),
    "PTTL": INTEGER_SHAPE,
    "PUBLISH": COUNT_SHAPE,
    "SENTINEL MASTERS": _shape("a list of maps", _is_list_of_flat_maps, _is_list_of_maps),
    "SET": _shape("OK or nothing", _is_ok_or_nothing),
    "SETRANGE": COUNT_SHAPE,
    "STRLEN": COUNT_SHAPE,
    "TIME": _shape("two numbers", _is_two_numbers),
    "UNLINK": COUNT_SHAPE,
    "WAIT": COUNT_SHAPE,
    "WAITAOF": _shape("two counts", _is_two_counts),
    "XACK": COUNT_SHAPE,
    "XADD": _shape("a position or nothing", _is_position_or_nothing),
    "XAUTOCLAIM": _shape("a position and entries of a stream", _is_claimed_entries),
    "XDEL": COUNT_SHAPE,
    "XGROUP CREATE": OK_SHAPE,
    "XINFO STREAM": _shape("the fields of a stream", _is_stream_description, lambda reply: type(reply) is dict),
    "XLEN": COUNT_SHAPE,
    "XRANGE": ENTRIES_SHAPE,
    "XREAD": STREAMS_SHAPE,
    "XREADGROUP": STREAMS_SHAPE,
    "XREVRANGE": ENTRIES_SHAPE,
    "XTRIM": COUNT_SHAPE,
    "ZADD": COUNT_SHAPE,
    "ZINCRBY": _shape("a score", _is_score),
    "ZRANGEBYSCORE": MEMBERS_SHAPE,
    "ZREM": COUNT_SHAPE,
    "ZREMRANGEBYRANK": COUNT_SHAPE,
    "ZREMRANGEBYSCORE": COUNT_SHAPE,
    "ZREVRANGE": MEMBERS_SHAPE,
    "_": _shape("OK, QUEUED or a list", _is_transaction_reply),
}
"""Shapes by command; redis-py uses `_` for replies within a transaction, of which EXEC's is the last."""


def check_replies(client: Client) -> Client:
    """Make a client and its pipelines raise WrongReply for a reply that does not have its command's shape.

    redis-py does not check replies: one of another type would cause an AttributeError or TypeError in the code that
    uses it.
    """
    is_resp2 = str(client.connection_pool.connection_kwargs.get("protocol")) == "2"
    callbacks: Any = client.response_callbacks
    for command, shape in REPLY_SHAPES.items():
        callbacks[command] = _checking_callback(command, shape, is_resp2, callbacks.get(command))
    return client


def checked_reply(command: str, reply: Any, shape: ReplyShape | None = None) -> Any:
    """Return the reply to a command sent by RESP2.

    Raises WrongReply unless it has the shape (default: REPLY_SHAPES').
    """
    shape = REPLY_SHAPES[command] if shape is None else shape
    if not shape.resp2_check(reply):
        refuse_reply(command, reply, shape.shape_in_words)
    return reply


def refuse_reply(command: str, reply: Any, expected_shape: str) -> NoReturn:
    """Raise WrongReply with the command, the reply, and the expected shape."""
    shown_command = "EXEC" if command == "_" else command
    raise WrongReply(f"{shown_command} was answered by {reply_excerpt(reply)}, not by {expected_shape}")


@contextmanager
def refusing_unreadable(command: str, expected_shape: str) -> Iterator[None]:
    """Convert a Python exception in the block, which reads a reply to `command`, to WrongReply."""
    try:
        yield
    except UNREADABLE_REPLY_ERRORS as error:
        raise WrongReply(
            f"{command} was not answered by {expected_shape} ({type(error).__name__}: {_shorten(str(error))})"
        ) from error


def info_number(server_info: Mapping[str, Any], info_field: str, default_number: int | None = None) -> int:
    """Return a number of INFO as redis-py parsed it; raise WrongReply if malformed, or missing without a default."""
    info_value = server_info.get(info_field, default_number)
    if type(info_value) is not int:
        refuse_reply("INFO", info_value, f"a number as {info_field}")
    return info_value


class _ReplyExcerpt(reprlib.Repr):
    """Excerpt of a reply of any size; visits only its first elements and bytes."""

    def repr_bytes(self, value: bytes, _level: int) -> str:
        return repr(value[:_EXCERPT_CHARS])


_EXCERPT_REPR: Final = _ReplyExcerpt()
_EXCERPT_REPR.maxother = _EXCERPT_REPR.maxstring = _EXCERPT_REPR.maxlong = _EXCERPT_CHARS


def reply_excerpt(reply: Any) -> str:
    """Return the reply as one line of at most 83 characters, control characters escaped."""
    return "nothing" if reply is None else _shorten(_EXCERPT_REPR.repr(reply))


def _shorten(text: str) -> str:
    text = ascii(text)[1:-1] if not text.isprintable() else text
    return text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}..."


def _checking_callback(
    command: str, shape: ReplyShape, is_resp2: bool, parse_reply: Callable[..., Any] | None
) -> Callable[..., Any]:
    description, has_shape = shape.shape_in_words, shape.resp2_check if is_resp2 else shape.resp3_check
    if parse_reply is None:

        def check(reply: Any, **_options: Any) -> Any:
            if not has_shape(reply):
                refuse_reply(command, reply, description)
            return reply

        return check

    def check_and_parse(reply: Any, **options: Any) -> Any:
        if not has_shape(reply):
            refuse_reply(command, reply, description)
        try:
            return parse_reply(reply, **options)
        except UNREADABLE_REPLY_ERRORS:
            refuse_reply(command, reply, description)

    if shape is not MEMBERS_SHAPE:
        return check_and_parse
    parse_scored_members = _checking_callback(command, SCORED_MEMBERS_SHAPE, is_resp2, parse_reply)

    def parse_members(reply: Any, **options: Any) -> Any:
        return (parse_scored_members if options.get("withscores") else check_and_parse)(reply, **options)

    return parse_members
