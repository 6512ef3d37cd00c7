"""Durations of steps that the manifest does not have, left beside the generation for the dashboard."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import orjson

from cache.errors import LarderError
from cache.store.artefacts import generation_path
from precompute.builds.build import Build


@contextmanager
def timed(build: Build, step: str) -> Iterator[None]:
    """Writes when the block began (Unix seconds) and the seconds it took, if it ends well; a step of `TIMED_APART`.

    A repeat that found the work done is shorter, and does not replace what the work took.
    """
    began_at, started = time.time(), time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    path = generation_path(build.generation, f"times/{step}.json")
    with suppress(LarderError, OSError, ValueError, TypeError, KeyError):  # it is for show
        earlier_times = build.store.read(path)
        if earlier_times is None or float(orjson.loads(earlier_times)["seconds"]) < seconds:
            times = {"began_at": round(began_at, 3), "seconds": round(seconds, 3)}
            build.store.write(path, orjson.dumps(times))
