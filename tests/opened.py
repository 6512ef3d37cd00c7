"""A generation opened for tests."""

from pathlib import Path

from cache.format.manifest import Manifest
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path, read_manifest


def open_generation(store: ArtefactStore, generation: str) -> tuple[Manifest, Path]:
    """Return the manifest and the local root of all files of a generation, with verified checksums."""
    manifest = read_manifest(store, generation)
    for artefact in manifest.served_artefacts():
        fetch_checked(store, generation, artefact)
    return manifest, store.local(generation_path(generation))
