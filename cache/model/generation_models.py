"""Models of a generation: which files they are, and how they are fetched, opened and warmed up.

A replica opens them here, and so does the gate that judges a generation before it is published.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cache.errors import LarderError
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.format.manifest_files import Artefact
from cache.model.predictor import ModelPrecision, Predictor
from cache.model.runtime import Accelerator
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path

log = logging.getLogger(__name__)

EventModels = TypeVar("EventModels")


def live_files(manifest: Manifest, precision: ModelPrecision | None = None) -> Iterator[Artefact]:
    """Files that only the live path reads: all of them, or those that it runs in one precision."""
    for model in manifest.models.values():
        if precision != "int8" or model.int8 is None:
            yield from model.fp32_files
        if precision != "fp32" and model.int8 is not None:
            yield model.int8
    yield from (index.file for index in manifest.indexes.values())


def open_warm(
    manifest: Manifest,
    root: Path,
    items: ItemTable,
    *,
    precision: ModelPrecision,
    threads: int = 1,
    cores: Sequence[int] = (),
    accelerator: Accelerator | None = None,
) -> Predictor:
    """Open the models of a generation's folder `root` and run each of them once; raises what ONNX Runtime raises."""
    predictor = Predictor.open(
        manifest,
        root,
        items,
        precision=precision,
        threads=threads,
        cores=cores,
        accelerator=accelerator,
    )
    predictor.warm()
    return predictor


def open_predictor(
    store: ArtefactStore,
    manifest: Manifest,
    items: ItemTable,
    precision: ModelPrecision,
    threads: int,
    cores: Sequence[int],
    accelerator: Accelerator | None,
) -> tuple[Predictor | None, str | None, str | None]:
    """(The warmed predictor or None, why there is none, why it is on the processor though an accelerator is asked)."""
    root = store.local(generation_path(manifest.generation))

    def open_on(device: Accelerator | None) -> Predictor:
        return open_warm(
            manifest,
            root,
            items,
            precision=precision,
            threads=threads,
            cores=cores,
            accelerator=device,
        )

    try:
        for artefact in live_files(manifest, precision):
            fetch_checked(store, manifest.generation, artefact)
        try:
            predictor = open_on(accelerator)
            fallback = predictor.fallback
        except Exception as error:  # a GPU fails for lack of memory, an operator or a driver
            if accelerator is None:
                raise
            log.warning(
                "generation %s: models failed on %s",
                manifest.generation,
                accelerator.provider,
                exc_info=error,
            )
            predictor = open_on(None)
            fallback = (
                f"the models failed on {accelerator.provider} ({type(error).__name__}, see the log)"
            )
    except Exception as error:  # a broken model must not take the stored answers along
        log.exception("generation %s has no working model", manifest.generation)
        return None, _reason(error), None
    if fallback is not None:
        log.warning(
            "generation %s: live models run on the processor: %s", manifest.generation, fallback
        )
    return predictor, None, fallback


def open_event_models(
    store: ArtefactStore,
    manifest: Manifest,
    open_models: Callable[[], EventModels],
    without: EventModels,
) -> tuple[EventModels, str | None]:
    """(The models for newer events, or `without` them; why they did not open)."""
    try:
        for artefact in [file for model in manifest.models.values() for file in model.fp32_files]:
            fetch_checked(store, manifest.generation, artefact)
        return open_models(), None
    except Exception as error:  # as with the predictor
        log.exception("generation %s has no working model for newer events", manifest.generation)
        return without, _reason(error)


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, LarderError) else type(error).__name__
