"""The artefact store: where the truth lies; a local folder or any fsspec URL."""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from cache.errors import CorruptArtefact, StoreError, UnknownGeneration
from cache.format.manifest import GENERATION, Manifest
from cache.format.manifest_files import Artefact
from cache.store.host_copies import HostCopies
from cache.store.local_files import disk_errors as disk_errors
from cache.store.local_files import last_change as last_change
from cache.store.local_files import links_needed, put_in_place
from cache.store.local_files import open_draft as open_draft
from cache.store.local_files import sync_folder as sync_folder
from cache.store.local_files import take_file as take_file
from cache.store.local_files import write_atomically as write_atomically
from cache.store.object_store import PROBE, ObjectStore

COPY_IDLE_S = 3_600.0
"""Seconds a copy must be unchanged before its removal: a newer one may belong to a generation in the making here."""

FETCH_TRIES = 3
"""Number of tries to fetch a file: a sweep may remove a folder while a copy is being written into it."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(root: Path, path: str) -> Artefact:
    """The manifest entry of a finished file."""
    file = root / path
    return Artefact(path, file.stat().st_size, sha256_of(file))


def check(root: Path, artefact: Artefact) -> None:
    """Raises CorruptArtefact unless the file has the size and checksum that the manifest states."""
    path = root / artefact.path
    if not path.is_file():
        raise CorruptArtefact(f"{artefact.path} is missing", path=artefact.path)
    size_bytes = path.stat().st_size
    if size_bytes != artefact.size_bytes:
        raise CorruptArtefact(
            f"{artefact.path} has {size_bytes} bytes, the manifest says {artefact.size_bytes}",
            path=artefact.path,
        )
    if (checksum := sha256_of(path)) != artefact.sha256:
        raise CorruptArtefact(
            f"{artefact.path} has SHA-256 {checksum}, the manifest says {artefact.sha256}",
            path=artefact.path,
        )


class ArtefactStore:
    """Files under one root; paths are relative, with forward slashes.

    `host_cache` is where files of a remote store are kept on this host; a local store needs none. `is_ephemeral`: that
    folder ends with the program, so its copies are not recorded.
    """

    def __init__(
        self, url: str, host_cache: Path | None = None, *, is_ephemeral: bool = False
    ) -> None:
        is_local = "://" not in url or url.startswith("file://")
        self._objects = None if is_local else ObjectStore(url.rstrip("/"))
        self.url = url.rstrip("/") if self._objects is None else self._objects.display_url
        self.folder: Path | None = (
            Path(url.removeprefix("file://")).absolute() if is_local else None
        )
        root = self.folder or host_cache
        if root is None:
            raise StoreError(
                f"{self.url} is a remote store and needs a folder for this host's copies"
            )
        self._root = root
        self.copies = (
            None
            if self._objects is None
            else HostCopies(root, self._objects, is_ephemeral=is_ephemeral)
        )

    def read(self, path: str) -> bytes | None:
        """A small file's bytes, or None when there is none."""
        try:
            if self._objects is not None:
                return self._objects.read(path)
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path} in {self.url}: {error}") from error

    def read_many(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Small files' bytes by path, without those that are not there; of a remote store many at once."""
        if self._objects is not None:
            return self._objects.read_many(paths)
        data_by_path = {path: self.read(path) for path in paths}
        return {path: data for path, data in data_by_path.items() if data is not None}

    def write(self, path: str, data: bytes) -> None:
        """Write a whole small file atomically."""
        if self._objects is not None:
            self._objects.write(path, data)
            return
        try:
            write_atomically(self._root / path, data)
        except OSError as error:
            raise StoreError(f"cannot write {path} in {self.url}: {error}") from error

    def write_once(self, path: str, data: bytes) -> bool:
        """Create a file that must not exist; False when it does. Whole or not at all."""
        if self._objects is not None:
            return self._objects.create(path, data)
        try:
            with open_draft(self._root / path, os.link) as draft_path:
                draft_path.write_bytes(data)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreError(
                f"cannot write {path} in {self.url}: {error}{links_needed(error)}"
            ) from error
        return True

    def demand_write_once(self) -> None:
        """Raises StoreError where no record could be written once: asked before hours of work that end in one."""
        self.write_once(PROBE, b"")

    def names(self, path: str) -> list[str]:
        """Names of the files and folders in a folder, sorted; hidden ones (unfinished writes) left out."""
        try:
            if self._objects is not None:
                entry_names = self._objects.names(path)
            else:
                entry_names = [entry.name for entry in (self._root / path).iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list {path} in {self.url}: {error}") from error
        return sorted(name for name in entry_names if not name.startswith("."))

    def delete(self, path: str) -> None:
        """Remove a file or a whole folder; nothing to remove is fine."""
        target = self._root / path
        try:
            if self._objects is not None:
                if self.copies is not None and (generation := _generation_of(path)) == target.name:
                    self.copies.drop(generation)
                shutil.rmtree(target, ignore_errors=True)
                self._objects.delete(path)
            else:
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"cannot delete {path} in {self.url}: {error}") from error

    def host_copies(self) -> list[str]:
        """Generations of a remote store of which this host keeps files; of a local store none are copies."""
        return [] if self.copies is None else self.copies.generations()

    def sweep_host_copies(self, in_use: Collection[str], *, cutoff_at: float) -> list[str]:
        """Remove this host's copies of generations that the store no longer has, see `HostCopies.sweep`."""
        if self.copies is None:
            return []
        return self.copies.sweep(lambda: self.names("generations"), in_use, cutoff_at=cutoff_at)

    def sweep_unfinished(self, *, cutoff_at: float) -> int:
        """Remove what killed writers left on this host (`.*.part`) before that time; how many there were."""
        unfinished_paths = [
            path for path in self._root.rglob(".*.part") if 0.0 < last_change(path) < cutoff_at
        ]
        for path in unfinished_paths:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return len(unfinished_paths)

    def local(self, path: str) -> Path:
        """Local path where this host has, or will write, a file; for a remote store a path in the host cache."""
        return self._root / path

    def fetch(self, path: str) -> Path:
        """A local path of an existing file, downloaded if the store is remote and this host has no copy."""
        target = self.local(path)
        for _ in range(FETCH_TRIES):
            if self._objects is None or target.exists():
                break
            if self.copies is not None and (generation := _generation_of(path)):
                self.copies.try_to_record(generation)
            target.parent.mkdir(parents=True, exist_ok=True)
            draft_path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            try:
                self._objects.get(path, draft_path)
                put_in_place(draft_path, target)
            except FileNotFoundError as error:
                if target.parent.is_dir():  # else swept while the copy was on its way
                    raise StoreError(f"{path} is not in {self.url}") from error
            except OSError as error:
                raise StoreError(f"cannot fetch {path} from {self.url}: {error}") from error
            finally:
                draft_path.unlink(missing_ok=True)
        return target

    def put(self, path: str) -> None:
        """Publish a finished local file under the same path; a local store has it already."""
        if self._objects is not None:
            self._objects.put(self.local(path), path)


def _generation_of(path: str) -> str | None:
    folder, _, subpath = path.partition("/")
    name = subpath.partition("/")[0]
    return name if folder == "generations" and GENERATION.fullmatch(name) else None


def generation_path(generation: str, path: str = "") -> str:
    """Store path of a generation or one of its files; raises UnknownGeneration for a malformed id."""
    if not GENERATION.fullmatch(generation):
        raise UnknownGeneration(f"{generation!r} is not a generation id", generation=generation)
    return f"generations/{generation}/{path}".rstrip("/")


def read_manifest(store: ArtefactStore, generation: str) -> Manifest:
    """The manifest of a finished generation; UnknownGeneration when there is none, CorruptArtefact for another's."""
    raw = store.read(generation_path(generation, "manifest.json"))
    if raw is None:
        raise UnknownGeneration(
            f"generation {generation} has no manifest in {store.url}", generation=generation
        )
    manifest = Manifest.from_bytes(raw)
    if manifest.generation != generation:
        raise CorruptArtefact(
            f"the manifest of generation {generation} calls itself {manifest.generation!r}",
            path=generation_path(generation, "manifest.json"),
        )
    return manifest


def fetch_checked(store: ArtefactStore, generation: str, artefact: Artefact) -> Path:
    """A file of a generation on this host, as the manifest states it; raises CorruptArtefact otherwise.

    A damaged copy of a remote store's file is downloaded once more.
    """
    root, path = (
        store.local(generation_path(generation)),
        generation_path(generation, artefact.path),
    )
    local_path = store.fetch(path)
    try:
        check(root, artefact)
    except CorruptArtefact:
        if store.folder is not None:
            raise
        # Unlinked, not overwritten: whoever has the damaged copy mapped keeps the bytes it saw.
        local_path.unlink(missing_ok=True)
        store.fetch(path)
        check(root, artefact)
    return local_path
