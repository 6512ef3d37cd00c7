"""Artefact store: a local folder or any fsspec URL, with atomic writes, and this host's copies of its files."""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from cache.errors import CorruptArtefact, StoreError, UnknownGeneration
from cache.format.manifest import GENERATION_PATTERN, Artefact, Manifest
from cache.store.object_store import PROBE_OBJECT_NAME, ObjectStore

COPIES_FOLDER = "copies"
"""Folder of the store with one record per generation and host that has copies of it."""

COPY_IDLE_S = 3_600.0
"""Seconds without a change before a copy may be removed: a copy that changed later may belong to a build on this
host."""

FETCH_TRIES = 3
"""Number of attempts to fetch a file: a sweep may remove the folder into which a copy is being written."""

NO_MANIFEST_WORDS = "has no manifest in"
"""Part of the error message for a generation that the store does not have; replicas report it by heartbeat."""

_RECORDED_MARKER = ".recorded"
_HOST_FILE = ".host"

_NO_LINKS_ERRNOS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV})
"""Error numbers of file systems without hard links: SMB, FAT and many FUSE mounts."""

log = logging.getLogger(__name__)


class ArtefactStore:
    """Files under one root; paths are relative, with forward slashes.

    `host_cache` is the folder for files of a remote store on this host; a local store needs none. `is_ephemeral`: the
    folder is deleted when the program ends, so that its copies are not recorded.
    """

    def __init__(self, url: str, host_cache: Path | None = None, *, is_ephemeral: bool = False) -> None:
        is_local = "://" not in url or url.startswith("file://")
        self._object_store = None if is_local else ObjectStore(url.rstrip("/"))
        self.url = url.rstrip("/") if self._object_store is None else self._object_store.display_url
        self.local_folder: Path | None = Path(url.removeprefix("file://")).absolute() if is_local else None
        root = self.local_folder or host_cache
        if root is None:
            raise StoreError(f"{self.url} is a remote store and needs a folder for copies on this host")
        self._root = root
        self.copies = (
            None if self._object_store is None else HostCopies(root, self._object_store, is_ephemeral=is_ephemeral)
        )

    def read(self, path: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        try:
            if self._object_store is not None:
                return self._object_store.read(path)
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path} in {self.url}: {error}") from error

    def read_many(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read small files; return those that exist, by path. A remote store reads many at once."""
        if self._object_store is not None:
            return self._object_store.read_many(paths)
        data_by_path = {path: self.read(path) for path in paths}
        return {path: data for path, data in data_by_path.items() if data is not None}

    def write(self, path: str, content: bytes) -> None:
        """Write a small file atomically."""
        if self._object_store is not None:
            self._object_store.write(path, content)
            return
        try:
            write_atomically(self._root / path, content)
        except OSError as error:
            raise StoreError(f"cannot write {path} in {self.url}: {error}") from error

    def write_once(self, path: str, content: bytes) -> bool:
        """Create a file atomically; return False if it exists."""
        if self._object_store is not None:
            return self._object_store.create(path, content)
        try:
            with open_draft(self._root / path, os.link) as draft_path:
                draft_path.write_bytes(content)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write {path} in {self.url}: {error}{hard_link_remedy(error)}") from error
        return True

    def demand_write_once(self) -> None:
        """Raise StoreError if the store cannot create files exclusively.

        Call this before long work that depends on exclusive creation.
        """
        self.write_once(PROBE_OBJECT_NAME, b"")

    def names(self, path: str) -> list[str]:
        """Return the sorted names of the files and folders in a folder, without hidden ones (unfinished writes)."""
        try:
            if self._object_store is not None:
                entry_names = self._object_store.names(path)
            else:
                entry_names = [entry.name for entry in (self._root / path).iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list {path} in {self.url}: {error}") from error
        return sorted(name for name in entry_names if not name.startswith("."))

    def delete(self, path: str) -> None:
        """Remove a file or a folder with its contents, if it exists."""
        local_path = self._root / path
        try:
            if self._object_store is not None:
                if self.copies is not None and (generation := _generation_of(path)) == local_path.name:
                    self.copies.drop(generation)
                shutil.rmtree(local_path, ignore_errors=True)
                self._object_store.delete(path)
            else:
                shutil.rmtree(local_path) if local_path.is_dir() else local_path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"cannot delete {path} in {self.url}: {error}") from error

    def host_copy_generations(self) -> list[str]:
        """Return the generations of a remote store of which this host keeps copies; empty for a local store."""
        return [] if self.copies is None else self.copies.generations()

    def sweep_host_copies(self, generations_in_use: Collection[str], *, cutoff_at: float) -> list[str]:
        """Remove this host's copies of generations that the store no longer has, see `HostCopies.sweep`."""
        if self.copies is None:
            return []
        return self.copies.sweep(lambda: self.names("generations"), generations_in_use, cutoff_at=cutoff_at)

    def sweep_unfinished(self, *, cutoff_at: float) -> int:
        """Remove files of killed writers on this host (`.*.part`) older than `cutoff_at`; return their number."""
        unfinished_paths = [path for path in self._root.rglob(".*.part") if 0.0 < last_change_time(path) < cutoff_at]
        for path in unfinished_paths:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return len(unfinished_paths)

    def local(self, path: str) -> Path:
        """Return the path of a file on this host, which need not exist yet; for a remote store in the host cache."""
        return self._root / path

    def fetch(self, path: str) -> Path:
        """Return the local path of an existing file; download it if the store is remote and this host has no copy."""
        local_path = self.local(path)
        for _ in range(FETCH_TRIES):
            if self._object_store is None or local_path.exists():
                break
            if self.copies is not None and (generation := _generation_of(path)):
                self.copies.try_to_record(generation)
            local_path.parent.mkdir(parents=True, exist_ok=True)
            draft_path = local_path.with_name(f".{local_path.name}.{secrets.token_hex(4)}.part")
            try:
                self._object_store.get(path, draft_path)
                put_in_place(draft_path, local_path)
            except FileNotFoundError as error:
                if local_path.parent.is_dir():  # otherwise a sweep removed the folder during the download
                    raise StoreError(f"{path} is not in {self.url}") from error
            except OSError as error:
                raise StoreError(f"cannot fetch {path} from {self.url}: {error}") from error
            finally:
                draft_path.unlink(missing_ok=True)
        return local_path

    def put(self, path: str) -> None:
        """Upload a finished local file to the same path; does nothing for a local store."""
        if self._object_store is not None:
            self._object_store.put(self.local(path), path)


def _generation_of(path: str) -> str | None:
    folder, _, subpath = path.partition("/")
    generation = subpath.partition("/")[0]
    return generation if folder == "generations" and GENERATION_PATTERN.fullmatch(generation) else None


def generation_path(generation: str, path: str = "") -> str:
    """Return the store path of a generation or one of its files; raise UnknownGeneration for a malformed id."""
    if not GENERATION_PATTERN.fullmatch(generation):
        raise UnknownGeneration(f"{generation!r} is not a generation id", generation=generation)
    return f"generations/{generation}/{path}".rstrip("/")


def read_manifest(store: ArtefactStore, generation: str) -> Manifest:
    """Read a finished generation's manifest.

    Raises UnknownGeneration without one, CorruptArtefact for another generation's.
    """
    manifest_bytes = store.read(generation_path(generation, "manifest.json"))
    if manifest_bytes is None:
        raise UnknownGeneration(f"generation {generation} {NO_MANIFEST_WORDS} {store.url}", generation=generation)
    manifest = Manifest.from_bytes(manifest_bytes)
    if manifest.generation != generation:
        raise CorruptArtefact(
            f"the manifest of generation {generation} names generation {manifest.generation!r}",
            path=generation_path(generation, "manifest.json"),
        )
    return manifest


def find_lost_files(store: ArtefactStore, generation: str) -> list[str]:
    """Return the paths of a generation's files that the store lacks; no file is read.

    A file of a local store that has another size than its manifest states counts as lost. Raises CorruptArtefact for
    an unreadable manifest.
    """
    try:
        manifest = read_manifest(store, generation)
    except UnknownGeneration:
        return ["manifest.json"]
    artefacts = [*manifest.served_artefacts(), *manifest.page_artefacts()]
    folder_paths = {artefact.path.rpartition("/")[0] for artefact in artefacts}
    present_paths = {
        f"{folder_path}/{name}".lstrip("/")
        for folder_path in folder_paths
        for name in store.names(generation_path(generation, folder_path))
    }
    return [
        artefact.path
        for artefact in artefacts
        if artefact.path not in present_paths or not _has_size(store, generation, artefact)
    ]


def _has_size(store: ArtefactStore, generation: str, artefact: Artefact) -> bool:
    """True if a file of a local store has the size that its manifest states; also true in a remote store."""
    if store.local_folder is None:
        return True
    try:
        return store.local(generation_path(generation, artefact.path)).stat().st_size == artefact.size_bytes
    except FileNotFoundError:
        return False


def fetch_checked(store: ArtefactStore, generation: str, artefact: Artefact) -> Path:
    """Return the local path of a generation's file, checked against the manifest; raise CorruptArtefact if it differs.

    A damaged copy of a remote store's file is downloaded once more.
    """
    generation_folder, store_path = (
        store.local(generation_path(generation)),
        generation_path(generation, artefact.path),
    )
    local_path = store.fetch(store_path)
    try:
        check_file(generation_folder, artefact)
    except CorruptArtefact:
        if store.local_folder is not None:
            raise
        # Unlink instead of overwriting: a process that has mapped the damaged copy keeps its bytes.
        local_path.unlink(missing_ok=True)
        store.fetch(store_path)
        check_file(generation_folder, artefact)
    return local_path


def check_file(generation_folder: Path, artefact: Artefact) -> None:
    """Raise CorruptArtefact unless the file has the size and checksum that the manifest states."""
    file_path = generation_folder / artefact.path
    if not file_path.is_file():
        raise CorruptArtefact(f"{artefact.path} is missing", path=artefact.path)
    size_bytes = file_path.stat().st_size
    if size_bytes != artefact.size_bytes:
        raise CorruptArtefact(
            f"{artefact.path} has {size_bytes} bytes, the manifest says {artefact.size_bytes}", path=artefact.path
        )
    if (checksum := sha256_of(file_path)) != artefact.sha256:
        raise CorruptArtefact(
            f"{artefact.path} has SHA-256 {checksum}, the manifest says {artefact.sha256}", path=artefact.path
        )


def describe_file(generation_folder: Path, path: str) -> Artefact:
    """Return the manifest entry of a finished file."""
    file_path = generation_folder / path
    return Artefact(path, file_path.stat().st_size, sha256_of(file_path))


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HostCopies:
    """Copies of a remote store's files under `root`, recorded in the store unless the folder is `is_ephemeral`.

    Erased data is removed only when no host has a copy of it. Hosts share nothing but the store, so each records there
    of which generations it has files, from before the first file is written until the last is removed.
    """

    def __init__(self, root: Path, objects: ObjectStore, *, is_ephemeral: bool) -> None:
        self._root = root
        self._object_store = objects
        self._is_ephemeral = is_ephemeral
        self._unrecorded_generations: set[str] = set()

    @property
    def host_id(self) -> str:
        """Name of the host and an id of its state folder; stable while the folder exists."""
        host_file = self._root / _HOST_FILE
        if not host_file.exists():
            host_name = "".join(c if c.isalnum() or c in "._" else "-" for c in socket.gethostname())
            with open_draft(host_file, put_in_place) as draft_path:
                draft_path.write_text(f"{host_name}-{secrets.token_hex(4)}")
        return host_file.read_text()

    def generations(self) -> list[str]:
        """Return the generations of which this host has files."""
        folder = self._root / "generations"
        if not folder.is_dir():
            return []
        return sorted(
            generation_folder.name
            for generation_folder in folder.iterdir()
            if GENERATION_PATTERN.fullmatch(generation_folder.name)
        )

    def record(self, generation: str) -> None:
        """Record in the store that this host has, or will have, files of a generation; once per generation."""
        marker_path = self._root / "generations" / generation / _RECORDED_MARKER
        if self._is_ephemeral or marker_path.exists():
            return
        copy_record = {"host": self.host_id, "at": time.time()}
        self._object_store.write(copies_record_path(generation, self.host_id), orjson.dumps(copy_record))
        marker_path.parent.mkdir(parents=True, exist_ok=True)
        marker_path.touch()

    def try_to_record(self, generation: str) -> None:
        """Record copies, for callers that can do without; after a failure no further attempt in this process."""
        if generation in self._unrecorded_generations:
            return
        try:
            self.record(generation)
        except (StoreError, OSError) as error:
            self._unrecorded_generations.add(generation)
            log.warning("cannot record copies of %s on this host: %s", generation, error)

    def sweep(
        self,
        list_stored_generations: Callable[[], Iterable[str]],
        generations_in_use: Collection[str],
        *,
        cutoff_at: float,
    ) -> list[str]:
        """Remove copies of generations that `list_stored_generations` does not return; return the generations removed.

        Keeps generations that are `generations_in_use`, and those that changed since `cutoff_at` (Unix seconds), which
        may be under construction. Removes nothing if the store lists no generation at all, which may be an error.
        Mapped files stay valid until they are closed.
        """
        copied_generations = [generation for generation in self.generations() if generation not in generations_in_use]
        stored_generations = set(list_stored_generations()) if copied_generations else set()
        removed_generations = []
        for generation in copied_generations:
            is_needed = not stored_generations or generation in stored_generations
            if is_needed or last_change_time(self._root / "generations" / generation) >= cutoff_at:
                self.try_to_record(generation)
            elif self.drop(generation):
                removed_generations.append(generation)
        return removed_generations

    def drop(self, generation: str) -> bool:
        """Remove the copies of a generation, then their record; return False if a part could not be removed yet."""
        folder = self._root / "generations" / generation
        if not folder.is_dir():
            return True
        for path in _copied_files(folder):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if _copied_files(folder):
            return False
        # Remove the marker last: if this sweep fails, the next one removes the record.
        if (folder / _RECORDED_MARKER).exists() and not self._unrecord(generation):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True

    def _unrecord(self, generation: str) -> bool:
        try:
            self._object_store.delete(copies_record_path(generation, self.host_id))
        except FileNotFoundError:
            pass
        except StoreError as error:
            log.warning("copies of %s are removed, but their record is not: %s", generation, error)
            return False
        return True


def _copied_files(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):  # another process on this host may be sweeping, too
        return [path for path in folder.iterdir() if path.name != _RECORDED_MARKER]
    return []


def copies_record_path(generation: str, host_id: str) -> str:
    """Return the store path of the record that a host has copies of a generation."""
    return f"{COPIES_FOLDER}/{generation}/{host_id}.json"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert a disk-full error to StoreError with a remedy; files finished before it are kept."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # FAISS raises RuntimeError with the system's text
        disk_full_texts = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
        if (
            disk_error := next((error_text for error_text in disk_full_texts if error_text in str(error)), None)
        ) is None:
            raise
        raise StoreError(
            f"cannot write {path}: {disk_error}; free space, retire generations or move `artifacts`, "
            "then run the step again",
            reason="disk_full",
        ) from error


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write to a draft, fsync, rename: readers, and crashes, see the old file or the new one, never a part."""
    with disk_errors(path), open_draft(path) as draft_path:
        draft_path.write_bytes(content)


@contextlib.contextmanager
def open_draft(path: Path, move_into_place: Callable[[Path, Path], object] = os.replace) -> Iterator[Path]:
    """Yield a draft path; when the block succeeds, fsync it, `move_into_place` it at `path`, and fsync the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield draft_path
        with draft_path.open("rb") as file:
            os.fsync(file.fileno())
        move_into_place(draft_path, path)
    finally:
        draft_path.unlink(missing_ok=True)
    sync_folder(path.parent)


def link_or_copy_file(source: Path, path: Path) -> None:
    """Link or copy a file to another path, atomically.

    Do not write to `source` afterwards: if the file system supports links, both names are the same file.
    """
    with disk_errors(path), open_draft(path) as draft_path:
        try:
            draft_path.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, draft_path)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder durable by fsync."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file, or the target of a link, is replaced or written.

    Returns None without a file.
    """
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns


def last_change_time(path: Path) -> float:
    """Return the time of the last change of a file, or of anything in a folder, in Unix seconds.

    Returns 0 if it does not exist. Uses the inode's change time: a copied file keeps the modification time of its
    original.
    """
    newest_change_at = 0.0
    for entry_path in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with contextlib.suppress(OSError):
            newest_change_at = max(newest_change_at, entry_path.lstat().st_ctime)
    return newest_change_at


def put_in_place(draft_path: Path, target: Path) -> None:
    """Move a draft to its target unless a file exists there, so that all workers map the same file."""
    try:
        os.link(draft_path, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS_ERRNOS:
            raise
        draft_path.rename(target)  # the same bytes; a process that has mapped the old file keeps it


def hard_link_remedy(error: OSError) -> str:
    """Return the remedy for a file system without hard links; empty for any other error."""
    if error.errno not in _NO_LINKS_ERRNOS:
        return ""
    return (
        ". This file system has no hard links, which are needed to create a record atomically: put `artifacts` on one "
        "that has (a local disk, NFS), or name a bucket by its own URL (s3://, gs://, abfs://) instead of a mount"
    )
