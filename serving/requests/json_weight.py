"""Count of the values in a JSON text, taken before it is parsed. Pure."""

import numpy as np
from numpy.typing import NDArray

_COMMA, _LIST, _OBJECT, _QUOTE, _BACKSLASH = b',[{"\\'
_CHUNK = 1 << 16


def has_more_values(text: bytes, values_max: int) -> bool:
    """True if a text, as JSON, holds more than `values_max` values: commas and opening brackets outside its strings."""
    value_count, is_inside, odd = 0, False, b""
    for start in range(0, len(text) if len(text) > values_max else 0, _CHUNK):
        chars = np.frombuffer(odd + text[start : start + _CHUNK], np.uint8)
        is_quote = chars == _QUOTE
        escaped = _escaped(chars)
        # A run of backslashes that is cut here goes on with as many as count: one or none.
        odd = b"\\" if len(escaped) and escaped[-1] == len(chars) else b""
        is_quote[escaped[: len(escaped) - len(odd)]] = False
        inside = np.bitwise_xor.accumulate(is_quote) ^ is_inside
        is_between = (chars == _COMMA) | (chars == _LIST) | (chars == _OBJECT)
        value_count += int(np.count_nonzero(is_between & ~inside))
        if value_count > values_max:
            return True
        is_inside = bool(inside[-1])
    return False


def _escaped(chars: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Places behind an odd number of backslashes; the last may lie behind the end."""
    slashes = np.flatnonzero(chars == _BACKSLASH)
    ends = np.flatnonzero(np.diff(slashes, append=-1) != 1)
    lengths = np.diff(ends, prepend=-1)
    escaped_positions: NDArray[np.int64] = slashes[ends[lengths % 2 == 1]] + 1
    return escaped_positions
