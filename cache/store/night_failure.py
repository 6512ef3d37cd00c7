"""Failure of the last night, a file of the store: written by nights, read by `larder status` and the service."""

from dataclasses import dataclass
from typing import Final

import orjson

from cache.errors import LarderError
from cache.store.artefacts import ArtefactStore

NIGHT_FAILURE_PATH: Final = "night_failed.json"
"""Path of the file in the store of a namespace."""


@dataclass(frozen=True, slots=True)
class NightFailure:
    """Step that raised, its generation (None before it has a name), the time in Unix seconds, and the error in words.

    `is_refused`: a gate refused the generation, which release records state as well.
    """

    step: str
    generation: str | None
    at: float
    error: str
    is_refused: bool = False


def last_failure(store: ArtefactStore) -> NightFailure | None:
    """Return the failure unless a later night succeeded; None without one, or if it cannot be read."""
    try:
        failure_bytes = store.read(NIGHT_FAILURE_PATH)
        return None if not failure_bytes else NightFailure(**orjson.loads(failure_bytes))
    except (LarderError, orjson.JSONDecodeError, TypeError):
        return None
