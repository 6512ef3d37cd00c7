"""The files that the sources name: on this host, or behind any fsspec URL."""

import glob
import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa

from cache.errors import LarderError, SourceError, StoreError
from cache.format.manifest import EntityKind
from cache.store.object_store import without_secrets
from precompute.config.settings import NightConfig


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind an fsspec URL, with as much of a path's interface as readers use."""

    url: str
    fs: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Part of the URL behind the last slash."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """Last suffix of the URL, as a path has it."""
        return PurePosixPath(self.url).suffix

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the URL, as a path has them."""
        return PurePosixPath(self.url).suffixes

    @contextmanager
    def open(self, _mode: str = "rb") -> Iterator[BinaryIO]:
        """Opens the file for reading bytes; it seeks. Raises StoreError for what its driver raises, meanwhile too."""
        with _driver_errors(self.url), self.fs.open(self.url, "rb") as opened:
            yield opened

    def __str__(self) -> str:
        return without_secrets(self.url)


SourceFile = Path | RemoteFile


@contextmanager
def readable(file: SourceFile) -> Iterator[Any]:
    """Input for Arrow's readers: the path of a local file, which they map, or an open remote one."""
    if isinstance(file, Path):
        yield file
        return
    with file.open() as raw:
        plain = pa.PythonFile(raw, mode="r")
        yield pa.CompressedInputStream(plain, "gzip") if file.suffix == ".gz" else plain


def source_file(name: str, base: Path) -> SourceFile:
    """The one file of this name, an URL or a path relative to `base`; nothing is looked at yet."""
    if "://" not in name:
        return base / name
    return RemoteFile(name, _file_system(name)[0])


def feature_file(config: NightConfig, entity: EntityKind, column: str) -> SourceFile:
    """File of an entity's features; raises SourceError for a `column` that a model wants where none is configured."""
    name = f"{entity}_features"
    if not (file := getattr(config.sources, name)):
        raise SourceError(
            f"the model wants the {entity} feature {column!r}, but sources.{name} is not set",
            column=column,
        )
    return source_file(file, config.path("."))


def source_files(patterns: Sequence[str], base: Path) -> list[SourceFile]:
    """The files that the patterns name, sorted within each; raises SourceError for a pattern without a file.

    In folders and behind wildcards, names that start with `_` or `.` are other programs' notes, not data.
    """
    found: list[SourceFile] = []
    for pattern in patterns:
        full = pattern if "://" in pattern else str(base / pattern)
        paths = _remote(full) if "://" in pattern else _local(base / pattern)
        if not paths:
            shown = without_secrets(full)
            raise SourceError(f"no source file matches {shown}", pattern=shown)
        found += paths
    return found


def all_files(config: NightConfig, events: Sequence[SourceFile] = ()) -> list[SourceFile]:
    """All inputs of a night but its bundle: interactions, those of `events` behind them, then tables."""
    sources = config.sources
    tables = (
        sources.user_features,
        sources.item_features,
        sources.user_vectors,
        sources.item_vectors,
    )
    base = config.path(".")
    return [
        *source_files(sources.interactions, base), *events, *source_files([*filter(None, tables)], base)
    ]  # fmt: skip


def pin(files: Sequence[SourceFile]) -> tuple[str, list[dict[str, object]]]:
    """Digest over contents of all input files, and the list of them for the manifest."""
    listed: list[dict[str, object]] = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            size_bytes = file.seek(0, os.SEEK_END)
        listed.append({"name": path.name, "size_bytes": size_bytes, "sha256": digest})
    return digest_of(listed), listed


def digest_of(listed: Sequence[Mapping[str, object]]) -> str:
    """Digest over contents of input files, from the list that `pin` made of them."""
    whole = hashlib.sha256()
    for each in listed:
        whole.update(bytes.fromhex(str(each["sha256"])))
    return whole.hexdigest()


def changed_at(file: SourceFile) -> float:
    """Time of a file's last write, Unix seconds."""
    if isinstance(file, Path):
        return file.stat().st_mtime
    with _driver_errors(file.url):
        written: datetime = file.fs.modified(file.url)
        return written.timestamp()


def _local(full: Path) -> list[SourceFile]:
    if full.is_file():
        return [full]
    names = full.iterdir() if full.is_dir() else map(Path, glob.glob(str(full), recursive=True))  # noqa: PTH207
    return [*sorted(path for path in names if path.is_file() and _is_data(path.name))]


def _remote(url: str) -> list[SourceFile]:
    fs, path = _file_system(url)
    with _driver_errors(url):
        fs.invalidate_cache()
        if fs.isfile(path):
            return [RemoteFile(url, fs)]
        entries = (
            fs.ls(path, detail=True) if fs.isdir(path) else fs.glob(path, detail=True).values()
        )
        names = sorted(each["name"] for each in entries if each["type"] == "file")
    return [
        RemoteFile(fs.unstrip_protocol(name), fs)
        for name in names
        if _is_data(PurePosixPath(name).name)
    ]


def _is_data(name: str) -> bool:
    return name[0] not in "_."


@contextmanager
def _driver_errors(url: str) -> Iterator[None]:
    """Turns what a driver raises beyond what readers know into a StoreError, which is worth another try."""
    try:
        yield
    except (LarderError, OSError, EOFError, UnicodeDecodeError, zlib.error, pa.ArrowException):
        raise
    except Exception as error:
        why = without_secrets(f"{type(error).__name__}: {error}")
        raise StoreError(f"cannot read {without_secrets(url)}: {why}") from None


def _file_system(url: str) -> tuple[Any, str]:
    try:
        fs, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SourceError(f"cannot open {url.partition('://')[0]}:// sources: {error}") from error
    return fs, path
