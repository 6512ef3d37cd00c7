"""Position in the event stream, in the form of manifests, requests and answers. Pure."""

import re
from typing import Final, NamedTuple, Self

from cache.errors import InvalidInput

_POSITION_TEXT = re.compile(r"([0-9]{1,13})-([0-9]{1,7})")
_SEQUENCE_BITS: Final = 20


class Position(NamedTuple):
    """Position: milliseconds since 1970 by Redis' clock, and a sequence number; greater than all earlier positions."""

    ms: int
    sequence: int

    @classmethod
    def parse(cls, position_text: str | bytes) -> Self:
        """Parse Redis' id of a stream entry, such as 1700000000000-3; raise InvalidInput for anything else."""
        id_match = _POSITION_TEXT.fullmatch(
            position_text.decode("ascii", "replace") if isinstance(position_text, bytes) else position_text
        )
        if id_match is None or int(id_match[2]) >> _SEQUENCE_BITS:
            raise InvalidInput(f"{position_text!r} is not the position of an event, such as 1700000000000-0")
        return cls(int(id_match[1]), int(id_match[2]))

    @property
    def number(self) -> int:
        """Position as one 64-bit number, in the same order."""
        return self.ms << _SEQUENCE_BITS | self.sequence

    @classmethod
    def from_number(cls, number: int) -> Self:
        """Convert from `number`."""
        return cls(number >> _SEQUENCE_BITS, number & ((1 << _SEQUENCE_BITS) - 1))

    def __str__(self) -> str:
        return f"{self.ms}-{self.sequence}"


STREAM_BEGINNING: Final = Position(0, 0)
"""Position before every event."""
