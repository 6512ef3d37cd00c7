"""Ids that are hard to encode: JSON escapes, separators of columns, URL encoding, lengths up to 256 bytes."""

from hypothesis import strategies as st

from cache.format.ids import ID_BYTES_MAX

_PIECES = (
    '"', ",", '",', '","', "\\", "\\\\", '\\"', '\\",', "[", "]", "{", "}", ":", "\0", "\n", "\r\n", "\t",
    "\x1b", "\x7f", "\x85", "\u2028", "\ufeff", "\ud7ff", "\ue000", "\uffff", "\U0001f955", "\U0010ffff", "é",
    "e\u0301", "\u202e", "/", "..", "%", "%2F", "%00", "?", "#", "&", "=", "+", " ", ";", "<", "'", "null", "0", "-1",
    "a", '"id":', '"source":"l1"', "\\u0000", "\\ud800",
)  # fmt: skip


def _cut(text: str) -> str:
    return text.encode()[:ID_BYTES_MAX].decode(errors="ignore")


ids = (
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=8).map("".join)
    | st.text(min_size=1, max_size=12)
    | st.tuples(st.sampled_from(_PIECES), st.integers(1, ID_BYTES_MAX)).map(
        lambda piece_and_count: _cut(piece_and_count[0] * piece_and_count[1])
    )
)
"""Valid ids, each hard to quote in one way or several."""

EVERY = tuple(dict.fromkeys([
    *_PIECES, *(f"a{piece}" for piece in _PIECES), *(_cut(piece * ID_BYTES_MAX) for piece in _PIECES),
]))  # fmt: skip
"""A fixed number of them: each piece alone, at the end of an id, and as often as fits."""
