"""The staging note: which generation replicas are asked to hold ready, for whom and until when. Pure."""

from dataclasses import asdict, dataclass
from typing import Self

import orjson

from cache.errors import CorruptArtefact


@dataclass(frozen=True, slots=True)
class Staging:
    """The value of the key `next`; nobody heeds it once `until` (Redis' time, Unix seconds) has passed."""

    generation: str
    attempt: str
    until: float

    def to_bytes(self) -> bytes:
        """JSON as stored in Redis."""
        return orjson.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads `to_bytes`; raises CorruptArtefact for anything else."""
        try:
            note = cls(**orjson.loads(raw))
            if not (isinstance(note.generation, str) and isinstance(note.until, int | float)):
                raise TypeError("generation is a string, until a number")
        except (orjson.JSONDecodeError, TypeError) as error:
            raise CorruptArtefact(f"not a staging note: {error}") from error
        return note
