"""Notes of a night's failure: the step that raised, kept in the store until that step succeeds or a night is done."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import orjson

from cache.errors import LarderError
from cache.store.night_failure import FILE, NightFailure, last_failure
from precompute.config.settings import NightConfig

_log = logging.getLogger("larder.night")


@contextmanager
def noting_failure(config: NightConfig, step: str, generation: str | None) -> Iterator[None]:
    """Note an error of the block, which is a step of the night, and forget that of an earlier try of the same step."""
    try:
        yield
    except Exception as error:
        message = error.message if isinstance(error, LarderError) else str(error)
        code = error.code if isinstance(error, LarderError) else type(error).__name__
        is_refused = step == "verify" and code == "refused"
        failure = NightFailure(step, generation, time.time(), f"{code}: {message}", is_refused)
        _write(config, orjson.dumps(asdict(failure)))
        raise
    forget_failure(config, step)


def forget_failure(config: NightConfig, step: str | None = None) -> None:
    """Forget the failure of a step, or of any, since it is done."""
    failure = last_failure(config.store())
    if failure is not None and step in (None, failure.step):
        _write(config, b"")


def _write(config: NightConfig, content: bytes) -> None:
    try:
        config.store().write(FILE, content)
    except (LarderError, OSError) as error:  # often the very reason why the step failed
        _log.warning("%s could not be written, so `larder status` does not tell: %s", FILE, error)
