"""Inputs of a build that must not change under it: its sources while they are read, its bundle once it was tried."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cache.errors import Refused, SourceError, StoreError
from cache.store.artefacts import take_file
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle
from precompute.sources.files import SourceFile, pin


@contextmanager
def unchanged_sources(digest: str, files: Sequence[SourceFile]) -> Iterator[None]:
    """Raises StoreError if one of the files became another meanwhile, whatever their reader made of it.

    Files that arrive meanwhile are none of them: they are for the next night.
    """
    with changed_or_broken(digest, files):
        yield
    if not _are_same(digest, files):
        raise _sources_changed_error()


@contextmanager
def changed_or_broken(digest: str, files: Sequence[SourceFile]) -> Iterator[None]:
    """Raises StoreError in place of an error of files that became others meanwhile: what is written over passes."""
    try:
        yield
    except (SourceError, Refused, StoreError) as error:  # what is written over reads like damage
        if _are_same(digest, files):
            raise
        raise _sources_changed_error() from error


def _are_same(digest: str, files: Sequence[SourceFile]) -> bool:
    try:
        return pin(files)[0] == digest
    except (SourceError, OSError):
        return False


def _sources_changed_error() -> StoreError:
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
