"""Text for a terminal: what would steer it, such as an escape sequence in an id, is shown instead."""

import re
from typing import Final

# Controls (C0 and C1), halves of surrogate pairs, the two separators of lines and of paragraphs, and what turns the
# direction of writing round.
_STEERING: Final = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_WORD: Final = re.compile(f"[{_STEERING}]")
_IN_LINES: Final = re.compile(f"(?![\t\n])[{_STEERING}]")


def printable(text: str) -> str:
    """An id, or another text within a line: steering characters as JSON writes them, `\\u001b`."""
    return _IN_A_WORD.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """Lines for a terminal; only breaks between lines and tabs stay as they are. What is JSON stays the same JSON."""
    return _IN_LINES.sub(_escaped, text)


def _escaped(character_match: re.Match[str]) -> str:
    return f"\\u{ord(character_match[0]):04x}"
