"""Inputs of a build that must not change under it: its sources while they are read, its bundle once it was tried."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cache.errors import Refused, SourceError, StoreError
from cache.store.artefacts import take_file
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle
from precompute.sources.files import SourceFile, all_files, pin


@contextmanager
def unchanged_sources(
    build: Build, digest: str, events: Sequence[SourceFile] = ()
) -> Iterator[None]:
    """Raises StoreError if the sources became others meanwhile, whatever their reader made of it."""
    broken: SourceError | Refused | None = None
    try:
        yield
    except (SourceError, Refused) as error:  # what is being written over reads like damage
        broken = error
    try:
        is_same = pin(all_files(build.config, events))[0] == digest
    except (SourceError, OSError):
        is_same = False
    if not is_same:
        raise StoreError(
            f"the source files changed while {build.generation} read them; run the night again"
        ) from broken
    if broken is not None:
        raise broken


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
