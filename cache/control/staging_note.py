"""The staging note: which generation replicas are asked to hold ready, for whom and until when. Pure."""

from dataclasses import asdict, dataclass
from typing import Self

import orjson

from cache.errors import CorruptArtefact
from cache.formats import FIELD, STAGING_NOTE, demand, stamp, version_of


@dataclass(frozen=True, slots=True)
class Staging:
    """The value of the key `next`; nobody heeds it once `until` (Redis' time, Unix seconds) has passed."""

    generation: str
    attempt: str
    until: float

    def to_bytes(self) -> bytes:
        """JSON as stored in Redis."""
        return orjson.dumps({**asdict(self), **stamp(STAGING_NOTE)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads `to_bytes`; raises CorruptArtefact for anything else."""
        try:
            data = orjson.loads(raw)
            demand(STAGING_NOTE, version_of(data))
            data.pop(FIELD, None)
            note = cls(**data)
            if not (isinstance(note.generation, str) and isinstance(note.until, int | float)):
                raise TypeError("generation is a string, until a number")
        except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a staging note: {error}") from error
        return note
