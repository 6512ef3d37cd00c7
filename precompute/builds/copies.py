"""Copies of a remote store that a step leaves on its host, recorded before they come and swept by the next step."""

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from cache.errors import LarderError, Refused, StoreError
from cache.format.manifest import GENERATION
from cache.store.artefacts import COPY_IDLE_S, ArtefactStore
from cache.store.releases import all_releases
from precompute.config.settings import NightConfig

P = ParamSpec("P")
R = TypeVar("R")


def on_this_host(
    step: Callable[Concatenate[NightConfig, Mapping[str, Any], P], R],
) -> Callable[Concatenate[NightConfig, Mapping[str, Any], P], R]:
    """A step that first removes this host's old copies, and records that it will have some of its generation.

    One whose generation is retired meanwhile, by a night of newer data, ends with Refused, not with a missing file.
    """

    @functools.wraps(step)
    def run(
        config: NightConfig, build: Mapping[str, Any], /, *arguments: P.args, **options: P.kwargs
    ) -> R:
        store, generation = config.store(), str(build["generation"])
        sweep_copies(store, in_use=[generation])
        record_copies(store, generation)
        try:
            return step(config, build, *arguments, **options)
        except (LarderError, FileNotFoundError) as error:
            demand_not_retired(store, generation, error)
            raise

    return run


def demand_not_retired(store: ArtefactStore, generation: str, error: Exception) -> None:
    """Raise Refused from `error` if the generation was retired while a step worked on it: its files are gone then."""
    try:
        records = [release for release in all_releases(store) if release.generation == generation]
    except (LarderError, OSError):
        return  # the store does not answer: the error itself is what can be told
    is_retired = bool(records) and records[-1].action == "retire"
    if is_retired and GENERATION.fullmatch(
        records[-1].attempt
    ):  # by a night: any other retirement is a person's
        newer_generation = records[-1].attempt
        raise Refused(
            f"{generation} was retired while it was being made, by {newer_generation}, which is of newer data: nothing "
            "is left to "
            "do here",
            rule="retired", value=generation, threshold=newer_generation,
        ) from error  # fmt: skip


def sweep_copies(store: ArtefactStore, *, in_use: Collection[str] = ()) -> None:
    """Remove copies of generations that the store no longer has; a store that does not answer is the step's affair."""
    with contextlib.suppress(StoreError, OSError):
        store.sweep_host_copies(in_use, cutoff_at=time.time() - COPY_IDLE_S)


def record_copies(store: ArtefactStore, generation: str) -> None:
    """Tell the store, if it is a remote one, that this host is about to have files of a generation."""
    if store.copies is not None:
        store.copies.record(generation)
