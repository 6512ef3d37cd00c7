"""Live models of a generation: fetched, checked and opened; a broken one never takes the pages along."""

import logging
from collections.abc import Callable, Iterator, Sequence

from cache.errors import LarderError
from cache.events.event_predictor import GenerationEvents
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.format.manifest_files import Artefact
from cache.model.predictor import Predictor
from cache.model.runtime import Accelerator
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path
from serving.config.settings import Precision

log = logging.getLogger(__name__)


def live_files(manifest: Manifest, precision: Precision | None = None) -> Iterator[Artefact]:
    """Files that only the live path reads: all of them, or those that it runs in one precision."""
    for model in manifest.models.values():
        if precision != "int8" or model.int8 is None:
            yield from model.fp32_files
        if precision != "fp32" and model.int8 is not None:
            yield model.int8
    yield from (index.file for index in manifest.indexes.values())


def open_predictor(
    store: ArtefactStore,
    manifest: Manifest,
    items: ItemTable,
    precision: Precision,
    threads: int,
    cores: Sequence[int],
    accelerator: Accelerator | None,
) -> tuple[Predictor | None, str | None, str | None]:
    """(the warmed predictor or None, why there is none, why it is on the processor though an accelerator is asked)."""
    root = store.local(generation_path(manifest.generation))

    def warmed(on: Accelerator | None) -> Predictor:
        predictor = Predictor.open(
            manifest, root, items, precision=precision, threads=threads, cores=cores, accelerator=on
        )
        predictor.warm()
        return predictor

    try:
        for artefact in live_files(manifest, precision):
            fetch_checked(store, manifest.generation, artefact)
        try:
            predictor = warmed(accelerator)
            fallback = predictor.fallback
        except Exception as error:  # of a GPU: of memory, of an operator, of a driver
            if accelerator is None:
                raise
            log.warning(
                "generation %s: models failed on %s",
                manifest.generation, accelerator.provider, exc_info=error,
            )  # fmt: skip
            predictor, fallback = (
                warmed(None),
                f"the models failed on {accelerator.provider} ({type(error).__name__}, see the log)",
            )
    except Exception as error:  # models are guests: a broken one must not take the pages along
        log.exception("generation %s has no working model", manifest.generation)
        return None, error.message if isinstance(error, LarderError) else type(error).__name__, None
    if fallback is not None:
        log.warning(
            "generation %s: live models run on the processor: %s", manifest.generation, fallback
        )
    return predictor, None, fallback


def open_event_models(
    store: ArtefactStore,
    manifest: Manifest,
    opened: Callable[[], GenerationEvents],
    without: GenerationEvents,
) -> tuple[GenerationEvents, str | None]:
    """(the models for newer events, or `without` them; why they did not open)."""
    try:
        for artefact in [each for model in manifest.models.values() for each in model.fp32_files]:
            fetch_checked(store, manifest.generation, artefact)
        return opened(), None
    except Exception as error:  # as of a predictor
        log.exception("generation %s has no working model for newer events", manifest.generation)
        return without, error.message if isinstance(error, LarderError) else type(error).__name__
