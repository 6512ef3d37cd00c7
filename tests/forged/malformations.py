"""Ways in which a reply of Redis can be malformed, by name."""

from collections.abc import Callable
from typing import NamedTuple


class Forgery(NamedTuple):
    """Bytes sent to the client in place of a reply, and whether the connection ends after them."""

    data: bytes
    ends: bool = False


Malformation = Callable[[bytes, bytes], Forgery]
"""From a reply, and the reply before it to the same command, to what takes its place."""

_LONG = 50_000


def _fixed(data: bytes, *, ends: bool = False) -> Malformation:
    return lambda _reply, _previous_reply: Forgery(data, ends)


def _resized(change: int) -> Malformation:
    """Return a string of another length with its true size, or another reply with a wrong element count."""

    def malform(reply: bytes, _previous_reply: bytes) -> Forgery:
        head, _, behind = reply.partition(b"\r\n")
        if head[:1] == b"$" and head != b"$-1":
            text = behind[:-2]
            text = text[:change] if change < 0 else text + b"x" * change
            return Forgery(b"$%d\r\n%b\r\n" % (len(text), text))
        if head[:1] in (b"*", b"%") and head[1:] not in (b"-1", b""):
            return Forgery(b"%b%d\r\n%b" % (head[:1], max(0, int(head[1:]) + change), behind), ends=True)
        return Forgery(reply[:-2] + b"x\r\n")

    return malform


def _misannounced(change: int) -> Malformation:
    """Return a string with a wrong announced size, so that what follows is read from a wrong byte on."""

    def malform(reply: bytes, _previous_reply: bytes) -> Forgery:
        head, _, behind = reply.partition(b"\r\n")
        if head[:1] != b"$" or head == b"$-1":
            return Forgery(b"$%d\r\n%b" % (max(0, len(reply) + change), reply), ends=True)
        return Forgery(b"$%d\r\n%b" % (max(0, int(head[1:]) + change), behind))

    return malform


MALFORMATIONS: dict[str, Malformation] = {
    # Another type.
    "an integer": _fixed(b":1\r\n"),
    "a negative integer": _fixed(b":-1\r\n"),
    "a simple string": _fixed(b"+OK\r\n"),
    "another simple string": _fixed(b"+forged\r\n"),
    "a string": _fixed(b"$6\r\nforged\r\n"),
    "a string of no UTF-8": _fixed(b"$4\r\n\xff\xfe\x00\x80\r\n"),
    "nothing": _fixed(b"$-1\r\n"),
    "no array": _fixed(b"*-1\r\n"),
    "null of RESP3": _fixed(b"_\r\n"),
    "a double": _fixed(b",1.5\r\n"),
    "not a number": _fixed(b",nan\r\n"),
    "true": _fixed(b"#t\r\n"),
    "a map": _fixed(b"%1\r\n+a\r\n+b\r\n"),
    "a set": _fixed(b"~1\r\n+a\r\n"),
    "an array of one": _fixed(b"*1\r\n$1\r\na\r\n"),
    "an array of nulls": _fixed(b"*3\r\n$-1\r\n$-1\r\n$-1\r\n"),
    "a big number": _fixed(b"(3492890328409238509324850943850943825024385\r\n"),
    # Empty.
    "an empty string": _fixed(b"$0\r\n\r\n"),
    "an empty array": _fixed(b"*0\r\n"),
    "an empty simple string": _fixed(b"+\r\n"),
    "the end of the connection": _fixed(b"", ends=True),
    # Sizes.
    "a byte too few": _resized(-1),
    "a byte too many": _resized(1),
    "many bytes too many": _resized(_LONG),
    "a size that is one too small": _misannounced(-1),
    "a size that is one too large": _misannounced(1),
    "half of it, and the end": lambda reply, _previous_reply: Forgery(reply[: len(reply) // 2], ends=True),
    "half of it, and silence": lambda reply, _previous_reply: Forgery(reply[: len(reply) // 2]),
    "silence": _fixed(b""),
    # Counts.
    "two billion elements": _fixed(b"*2147483647\r\n"),
    "two billion pairs": _fixed(b"%2147483647\r\n"),
    "two billion bytes": _fixed(b"$2147483647\r\n"),
    "a count beyond 64 bits": _fixed(b"*99999999999999999999999\r\n"),
    "a size beyond 64 bits": _fixed(b"$99999999999999999999999\r\n"),
    "a negative count": _fixed(b"*-7\r\n"),
    "a negative size": _fixed(b"$-7\r\n"),
    "a count in words": _fixed(b"*many\r\n"),
    "no count": _fixed(b"*\r\n"),
    # Numbers.
    "an integer beyond 64 bits": _fixed(b":9223372036854775808\r\n"),
    "an integer of a hundred digits": _fixed(b":" + b"9" * 100 + b"\r\n"),
    "the largest integer": _fixed(b":9223372036854775807\r\n"),
    "an integer in words": _fixed(b":many\r\n"),
    "a string of the largest integer": _fixed(b"$19\r\n9223372036854775807\r\n"),
    # Nesting.
    "arrays nested nine deep": _fixed(b"*1\r\n" * 9 + b":1\r\n"),
    "arrays nested deeper than parsers go": _fixed(b"*1\r\n" * 5_000 + b":1\r\n"),
    "a map whose keys are arrays": _fixed(b"%1\r\n*1\r\n:1\r\n*1\r\n:1\r\n"),
    # Errors.
    "an error": _fixed(b"-ERR forged\r\n"),
    "an error without text": _fixed(b"-\r\n"),
    "an error of no UTF-8": _fixed(b"-ERR \xff\xfe\x80\r\n"),
    "a long error": _fixed(b"-ERR " + b"x" * _LONG + b"\r\n"),
    "LOADING": _fixed(b"-LOADING Redis is loading the dataset in memory\r\n"),
    "MOVED": _fixed(b"-MOVED 1 127.0.0.1:1\r\n"),
    "ASK": _fixed(b"-ASK 1 127.0.0.1:1\r\n"),
    "NOSCRIPT": _fixed(b"-NOSCRIPT No matching script.\r\n"),
    "READONLY": _fixed(b"-READONLY You can't write against a read only replica.\r\n"),
    "NOAUTH": _fixed(b"-NOAUTH Authentication required.\r\n"),
    "WRONGTYPE": _fixed(b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"),
    "NOPERM": _fixed(b"-NOPERM this user has no permissions\r\n"),
    "OOM": _fixed(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
    "EXECABORT": _fixed(b"-EXECABORT Transaction discarded because of previous errors.\r\n"),
    "an error within an array": _fixed(b"*1\r\n-ERR forged\r\n"),
    "a bulk error": _fixed(b"!10\r\nERR forged\r\n"),
    # Order.
    "the reply before": lambda reply, previous_reply: Forgery(previous_reply or reply),
    "the reply twice": lambda reply, _previous_reply: Forgery(reply + reply),
    "another reply in front": lambda reply, _previous_reply: Forgery(b"$6\r\nforged\r\n" + reply),
    # Pushed.
    "a pushed invalidation in front": lambda reply, _previous_reply: Forgery(
        b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n" + reply
    ),
    "a pushed message in front": lambda reply, _previous_reply: Forgery(
        b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n" + reply
    ),
    "a push of nothing": lambda reply, _previous_reply: Forgery(b">0\r\n" + reply),
    "nothing but a push": _fixed(b">2\r\n+a\r\n+b\r\n"),
    "attributes in front": lambda reply, _previous_reply: Forgery(b"|1\r\n+ttl\r\n:3600\r\n" + reply),
    # Garbage.
    "an answer of HTTP": _fixed(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", ends=True),
    "bytes": _fixed(bytes(range(256)) * 4),
    "zeros": _fixed(b"\0" * 1_000),
    "empty lines": _fixed(b"\r\n\r\n"),
    "a line without an end": _fixed(b"+" + b"x" * _LONG),
}  # fmt: skip
