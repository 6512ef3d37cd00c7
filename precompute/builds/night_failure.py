"""Notes of a night's failure: the step that raised, kept in the store until that step succeeds or a night ends well.

A night in one process also notes its current step on its host, for the case that it is killed.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import orjson

from cache.errors import LarderError
from cache.store.night_failure import NIGHT_FAILURE_PATH, NightFailure, last_failure
from precompute.config.settings import NightConfig

RUNNING_SUFFIX: Final = ".night_running.json"
"""Suffix of the file, one per namespace, in the folder `state` that a night in one process holds locked."""

_log = logging.getLogger("larder.night")


@contextmanager
def note_failure_of_step(config: NightConfig, step_name: str, generation: str | None) -> Iterator[None]:
    """Note an error of the block, a step of the night; if it succeeds, remove the note of its earlier failure."""
    try:
        yield
    except Exception as error:
        message = error.message if isinstance(error, LarderError) else str(error)
        error_code = error.code if isinstance(error, LarderError) else type(error).__name__
        is_refused = step_name == "verify" and error_code == "refused"
        failure = NightFailure(step_name, generation, time.time(), f"{error_code}: {message}", is_refused)
        _write_failure_file(config, orjson.dumps(asdict(failure)))
        raise
    forget_failure(config, step_name)


def forget_failure(config: NightConfig, step_name: str | None = None) -> None:
    """Remove the note of a step's failure; without a step, of any failure, and the note of a killed night."""
    if step_name is None:
        with suppress(OSError):
            _running_file_path(config).unlink(missing_ok=True)
    failure = last_failure(config.store())
    if failure is not None and step_name in (None, failure.step):
        _write_failure_file(config, b"")


@contextmanager
def hold_running_file(config: NightConfig) -> Iterator[Callable[[str, str | None], None]]:
    """Hold the file that marks a running night; yield a function that notes the current step and its generation."""
    running_path = _running_file_path(config)
    try:
        running_path.parent.mkdir(parents=True, exist_ok=True)
        file = running_path.open("a+b")
    except OSError as error:
        _log.warning("%s: %s; `larder status` will not show if this night is killed", running_path, error)
        yield lambda _step, _generation: None
        return

    def note_step(step_name: str, generation: str | None) -> None:
        file.truncate(0)
        file.write(orjson.dumps({"step": step_name, "generation": generation}))
        file.flush()

    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield note_step
        finally:
            running_path.unlink(missing_ok=True)


def find_killed_step(config: NightConfig) -> str | None:
    """Return the step and generation in which a night of this host was killed; None if none was or one is running."""
    try:
        with _running_file_path(config).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            running_note = orjson.loads(file.read())
        generation = running_note["generation"]
        return f"{running_note['step']} ({generation})" if generation else str(running_note["step"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _running_file_path(config: NightConfig) -> Path:
    return config.path(config.state) / f"{config.namespace}{RUNNING_SUFFIX}"


def _write_failure_file(config: NightConfig, file_content: bytes) -> None:
    try:
        config.store().write(NIGHT_FAILURE_PATH, file_content)
    except (LarderError, OSError) as error:  # the store often failed the step itself
        _log.warning("%s could not be written, so `larder status` will not show it: %s", NIGHT_FAILURE_PATH, error)
