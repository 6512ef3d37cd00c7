"""Inputs of a build that must not change under it: its sources while they are read, its bundle once it was tried."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cache.errors import Refused, SourceError, StoreError
from cache.store.artefacts import take_file
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.sources.files import SourceFile, all_files, pin


@contextmanager
def unchanged_sources(
    build: Build, digest: str, events: Sequence[SourceFile] = ()
) -> Iterator[None]:
    """Raises StoreError if the sources became others meanwhile, whatever their reader made of it."""
    with changed_or_broken(build.config, digest, events):
        yield
    if not _are_same(build.config, digest, events):
        raise _changed()


@contextmanager
def changed_or_broken(
    config: NightConfig, digest: str, events: Sequence[SourceFile] = ()
) -> Iterator[None]:
    """Raises StoreError in place of an error of sources that became others meanwhile: what is written over passes."""
    try:
        yield
    except (SourceError, Refused) as error:  # what is being written over reads like damage
        if _are_same(config, digest, events):
            raise
        raise _changed() from error


def _are_same(config: NightConfig, digest: str, events: Sequence[SourceFile]) -> bool:
    try:
        return pin(all_files(config, events))[0] == digest
    except (SourceError, OSError):
        return False


def _changed() -> StoreError:
    return StoreError("the source files changed while the night read them; run the night again")


def pin_bundle(build: Build, bundle: Bundle) -> list[str]:
    """The copied bundle, once tried, becomes part of the generation, its models also by their own names.

    Returns its files, sorted; raises BundleError for a model that is not what the bundle says.
    """
    for model in bundle.models:
        for source, name, _ in model.files:
            take_file(source, build.path(name))
    # From where all other steps open them: what does not open there fails here, not hours later.
    bundle.try_models(lambda model: build.path(f"models/{model.name}.fp32.onnx"))
    names = sorted(
        path.relative_to(bundle.path).as_posix()
        for path in bundle.path.rglob("*")
        if path.is_file()
    )
    for name in names:
        take_file(bundle.path / name, build.path(f"bundle/{name}"))
    return names
