"""Files of this host: written whole or not at all, and when they last changed."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cache.errors import StoreError

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV})
"""Error numbers of file systems without hard links: SMB, FAT and many FUSE mounts."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk into a StoreError with its remedy; what was finished before stays finished."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # FAISS says it in the text of a RuntimeError
        full = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
        if (
            disk_error := next(
                (error_text for error_text in full if error_text in str(error)), None
            )
        ) is None:
            raise
        raise StoreError(
            f"cannot write {path}: {disk_error}; free space, retire generations or move `artifacts`, "
            "then run the step again",
            reason="disk_full",
        ) from error


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write beside, fsync, rename: a reader or a crash sees the old file or the new one, never a part."""
    with disk_errors(path), open_draft(path) as draft_path:
        draft_path.write_bytes(data)


@contextlib.contextmanager
def open_draft(path: Path, put: Callable[[Path, Path], object] = os.replace) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well: fsync, `put`, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield draft_path
        with draft_path.open("rb") as file:
            os.fsync(file.fileno())
        put(draft_path, path)
    finally:
        draft_path.unlink(missing_ok=True)
    sync_folder(path.parent)


def take_file(source: Path, path: Path) -> None:
    """Puts a file's bytes under another name, as `write_atomically` would leave them.

    `source` must never be written to again: where the file system can, both names are one file.
    """
    with disk_errors(path), open_draft(path) as draft_path:
        try:
            draft_path.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, draft_path)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Value that differs once a file, or what a link leads to, was replaced or written; None while there is none."""
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns


def last_change(path: Path) -> float:
    """Time at which anything in a file or folder last came or changed, Unix seconds; 0 when it is gone.

    By the inode's own time: a copied file keeps the modification time of its original.
    """
    newest_change_at = 0.0
    for entry_path in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with contextlib.suppress(OSError):
            newest_change_at = max(newest_change_at, entry_path.lstat().st_ctime)
    return newest_change_at


def put_in_place(draft_path: Path, target: Path) -> None:
    """Puts a file at its target; one that another worker put there first stays, so that all map a single file."""
    try:
        os.link(draft_path, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        draft_path.rename(target)  # the same bytes: who has mapped the file before keeps it


def links_needed(error: OSError) -> str:
    """The remedy where a file system has no hard links; empty for any other error."""
    if error.errno not in _NO_LINKS:
        return ""
    return (
        ". This file system has no hard links, by which a record is written once and whole: put `artifacts` on one "
        "that has (a local disk, NFS), or name a bucket by its own URL (s3://, gs://, abfs://) instead of a mount"
    )
