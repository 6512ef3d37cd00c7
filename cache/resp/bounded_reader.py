"""A hiredis reader that refuses a reply for what it announces, before room is made for it.

For `*2147483647\r\n`, 13 bytes, hiredis makes a list of 2**31 places at once: 16 GiB of address space, and freeing it
holds the process for 9 to 24 s. A payload (`$`) it makes room for only as its bytes come.
"""

from typing import Any, Final, NamedTuple

import hiredis

from cache.native import loader


class ReplyBounds(NamedTuple):
    """Elements that one reply may announce, nested ones included, and bytes that one payload may."""

    elements: int
    payload_bytes: int


RECORD_REPLIES: Final = ReplyBounds(elements=1_024, payload_bytes=64 << 20)
"""Bounds for the read path: its commands are answered by one string or number each, by no list; a server may push."""

COMMAND_REPLIES: Final = ReplyBounds(elements=1 << 20, payload_bytes=512 << 20)
"""Bounds for all other commands.

The longest list that is asked for is a slot map (at most 16,384 ranges with some ten elements each) or a registry; for
a million elements hiredis takes 8 MiB. 512 MiB is the longest string that Redis keeps (`proto-max-bulk-len`).
"""


def scanner_of(bounds: ReplyBounds) -> Any:
    """A scanner of one connection's replies; `admits(data)` is to be asked before a parser gets the same bytes."""
    return loader.kernels.ReplyScanner(*bounds)


def refusal(bounds: ReplyBounds) -> str:
    """The reason why a connection ends whose replies a scanner does not admit."""
    return f"a reply announces more than {bounds.elements} elements or {bounds.payload_bytes} bytes"


class BoundedReader(hiredis.Reader):
    """A hiredis.Reader that raises in `feed`, by its `protocolError`, for what announces more than the bounds."""

    def __init__(self, bounds: ReplyBounds, **settings: Any) -> None:
        super().__init__(**settings)
        self._error = settings.get("protocolError", hiredis.ProtocolError)
        self._bounds = bounds
        self._scanner = scanner_of(bounds)

    def feed(self, buffer: Any, start: int = 0, size: int = -1, /) -> None:
        """Adds bytes from the server: all of `buffer`, or `size` of them from `start`."""
        size = size if size >= 0 else len(buffer) - start
        if not self._scanner.admits(memoryview(buffer)[start : start + size]):
            raise self._error(refusal(self._bounds))
        super().feed(buffer, start, size)
