"""The artefact store: where the truth lies; a local folder or any fsspec URL."""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import fsspec

from cache.errors import CorruptArtefact, StoreError, UnknownGeneration
from cache.manifest import GENERATION, Artefact, Manifest

_CHUNK_BYTES = 1 << 20

COPY_IDLE_S = 3_600.0
"""A copy that changed more recently may belong to a generation that is being made on this host."""


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
    if (found := sha256_of(path)) != artefact.sha256:
        raise CorruptArtefact(
            f"{artefact.path} has SHA-256 {found}, the manifest says {artefact.sha256}",
            path=artefact.path,
        )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk becomes a StoreError with its remedy; what was finished before stays finished."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # FAISS says it in the text of a RuntimeError
        full = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
        if (why := next((each for each in full if each in str(error)), None)) is None:
            raise
        raise StoreError(
            f"cannot write {path}: {why}; free space, retire generations or move `artifacts`, "
            "then run the step again",
            reason="disk_full",
        ) from error


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write beside, fsync, rename: a reader or a crash sees the old file or the new one, never a part."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well: fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def take_file(source: Path, path: Path) -> None:
    """The same bytes under another name, as `write_atomically` would leave them.

    `source` must never be written to again: where the file system can, both names are one file.
    """
    with disk_errors(path), written_beside(path) as beside:
        try:
            beside.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, beside)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_change(path: Path) -> float:
    """When anything in a file or folder last came or changed, Unix seconds; 0 when it is gone.

    By the inode's own time: a copied file keeps the modification time of its original.
    """
    newest = 0.0
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with contextlib.suppress(OSError):
            newest = max(newest, each.lstat().st_ctime)
    return newest


class ArtefactStore:
    """Files under one root; paths are relative, with forward slashes.

    `host_cache` is where files of a remote store are kept on this host; a local store needs none.
    """

    def __init__(self, url: str, host_cache: Path | None = None) -> None:
        self.url = url.rstrip("/")
        is_local = "://" not in url or url.startswith("file://")
        self.folder: Path | None = (
            Path(url.removeprefix("file://")).absolute() if is_local else None
        )
        root = self.folder or host_cache
        if root is None:
            raise StoreError(f"{url} is a remote store and needs a folder for this host's copies")
        self._root = root
        self._fs: Any = None

    def _remote(self, path: str) -> tuple[Any, str]:
        if self._fs is None:
            try:
                self._fs = fsspec.url_to_fs(self.url)[0]
            except (ImportError, ValueError, OSError) as error:
                raise StoreError(f"cannot open the artefact store {self.url}: {error}") from error
        return self._fs, f"{self.url}/{path}"

    def read(self, path: str) -> bytes | None:
        """A small file's bytes, or None when there is none."""
        try:
            if self.folder is not None:
                return (self.folder / path).read_bytes()
            fs, url = self._remote(path)
            data: bytes = fs.cat_file(url)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path} in {self.url}: {error}") from error
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a whole small file atomically."""
        try:
            if self.folder is not None:
                write_atomically(self.folder / path, data)
            else:
                fs, url = self._remote(path)
                fs.pipe_file(url, data)
        except OSError as error:
            raise StoreError(f"cannot write {path} in {self.url}: {error}") from error

    def write_once(self, path: str, data: bytes) -> bool:
        """Create a file that must not exist; False when it does. Whole or not at all."""
        try:
            if self.folder is None:
                fs, url = self._remote(path)
                if fs.exists(url):
                    return False
                fs.pipe_file(url, data, mode="create")
                return True
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            try:
                with beside.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(beside, target)
            finally:
                beside.unlink(missing_ok=True)
            sync_folder(target.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write {path} in {self.url}: {error}") from error
        return True

    def names(self, path: str) -> list[str]:
        """Names of the files and folders in a folder, sorted; hidden ones (unfinished writes) left out."""
        try:
            if self.folder is not None:
                found = [entry.name for entry in (self.folder / path).iterdir()]
            else:
                fs, url = self._remote(path)
                fs.invalidate_cache()
                found = [name.rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(url, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list {path} in {self.url}: {error}") from error
        return sorted(name for name in found if not name.startswith("."))

    def delete(self, path: str) -> None:
        """Remove a file or a whole folder; nothing to remove is fine."""
        try:
            if self.folder is not None:
                target = self.folder / path
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            else:
                fs, url = self._remote(path)
                shutil.rmtree(self._root / path, ignore_errors=True)
                fs.rm(url, recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"cannot delete {path} in {self.url}: {error}") from error

    def host_copies(self) -> list[str]:
        """Generations of a remote store of which this host keeps files; of a local store none are copies."""
        folder = self._root / "generations"
        if self.folder is not None or not folder.is_dir():
            return []
        return sorted(each.name for each in folder.iterdir() if GENERATION.fullmatch(each.name))

    def sweep_host_copies(self, in_use: Collection[str], *, before: float) -> list[str]:
        """Remove this host's copies of generations that the store no longer has; the generations removed.

        Never one `in_use`, nor one that changed since `before` (Unix seconds): it may be in the making here. A store
        that shows no generation at all proves nothing and loses no copy.
        """
        copies = [each for each in self.host_copies() if each not in in_use]
        stored = set(self.names("generations")) if copies else set()
        gone = []
        for generation in copies:
            path = self._root / "generations" / generation
            if stored and generation not in stored and last_change(path) < before:
                shutil.rmtree(path, ignore_errors=True)
                gone.append(generation)
        return gone

    def sweep_unfinished(self, *, before: float) -> int:
        """Remove what killed writers left on this host (`.*.part`) before that time; how many there were."""
        found = [path for path in self._root.rglob(".*.part") if 0.0 < last_change(path) < before]
        for path in found:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return len(found)

    def local(self, path: str) -> Path:
        """Where this host has, or will write, a file; for a remote store a place in the host cache."""
        return self._root / path

    def fetch(self, path: str) -> Path:
        """A local path of an existing file, downloaded if the store is remote and this host has no copy."""
        target = self.local(path)
        if self.folder is None and not target.exists():
            fs, url = self._remote(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            try:
                fs.get_file(url, str(beside))
                # What another worker brought meanwhile is mapped there: all map one file, or each holds its own.
                with contextlib.suppress(FileExistsError):
                    os.link(beside, target)
            except FileNotFoundError as error:
                raise StoreError(f"{path} is not in {self.url}") from error
            except OSError as error:
                raise StoreError(f"cannot fetch {path} from {self.url}: {error}") from error
            finally:
                beside.unlink(missing_ok=True)
        return target

    def put(self, path: str) -> None:
        """Publish a finished local file under the same path; a local store has it already."""
        if self.folder is None:
            fs, url = self._remote(path)
            try:
                fs.put_file(str(self.local(path)), url)
            except OSError as error:
                raise StoreError(f"cannot write {path} to {self.url}: {error}") from error


def generation_path(generation: str, path: str = "") -> str:
    """Store path of a generation or one of its files; raises UnknownGeneration for a malformed id."""
    if not GENERATION.fullmatch(generation):
        raise UnknownGeneration(f"{generation!r} is not a generation id", generation=generation)
    return f"generations/{generation}/{path}".rstrip("/")


def read_manifest(store: ArtefactStore, generation: str) -> Manifest:
    """The manifest of a finished generation; raises UnknownGeneration when there is none."""
    raw = store.read(generation_path(generation, "manifest.json"))
    if raw is None:
        raise UnknownGeneration(
            f"generation {generation} has no manifest in {store.url}", generation=generation
        )
    return Manifest.from_bytes(raw)


def open_generation(store: ArtefactStore, generation: str) -> tuple[Manifest, Path]:
    """The manifest and the local root of all files a reader needs, every checksum verified first."""
    manifest = read_manifest(store, generation)
    for artefact in manifest.artefacts():
        fetch_checked(store, generation, artefact)
    return manifest, store.local(generation_path(generation))


def fetch_checked(store: ArtefactStore, generation: str, artefact: Artefact) -> Path:
    """A file of a generation on this host, as the manifest states it; raises CorruptArtefact otherwise.

    A damaged copy of a remote store's file is downloaded once more.
    """
    root, path = (
        store.local(generation_path(generation)),
        generation_path(generation, artefact.path),
    )
    found = store.fetch(path)
    try:
        check(root, artefact)
    except CorruptArtefact:
        if store.folder is not None:
            raise
        # Unlinked, not overwritten: whoever has the damaged copy mapped keeps the bytes it saw.
        found.unlink(missing_ok=True)
        store.fetch(path)
        check(root, artefact)
    return found
