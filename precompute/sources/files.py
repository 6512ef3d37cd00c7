"""The files that the sources name: on this host, or behind any fsspec URL."""

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

import fsspec
import pyarrow as pa

from cache.errors import LarderError, SourceError, StoreError
from cache.format.manifest import EntityKind
from cache.store.object_store import without_secrets
from precompute.config.settings import NightConfig
from precompute.sources.folders import (
    Entry,
    LocalStorage,
    Selection,
    demand_plain_folder,
    is_data,
    select,
)

COPY_BYTES_LEAST = 4096
"""Bytes of a file from which on another one with the same bytes is a copy of it."""
COPIES_LOOKED_AT = 20
"""Files of equal sizes that a look before a night compares."""


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
        arrow_file = pa.PythonFile(raw, mode="r")
        yield pa.CompressedInputStream(arrow_file, "gzip") if file.suffix == ".gz" else arrow_file


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
    """The files that the patterns name, sorted within each, and a file that is named twice once.

    `folders.select` says which files of a folder are data, and which tables are refused. Raises SourceError for a
    pattern without a file.
    """
    file_by_identity: dict[str, SourceFile] = {}
    plain_folders: set[str] = set()
    for pattern in patterns:
        is_remote = "://" in pattern
        named = (
            _remote(pattern, plain_folders) if is_remote else _local(pattern, base, plain_folders)
        )
        for identity, file in named:
            file_by_identity.setdefault(identity, file)
    return list(file_by_identity.values())


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Input files of a night as its beginning listed them: what arrives later is for the next night."""

    interactions: tuple[SourceFile, ...] = ()
    events: tuple[SourceFile, ...] = ()
    tables: tuple[SourceFile, ...] = ()

    @classmethod
    def of(cls, config: NightConfig, events: Sequence[SourceFile] = ()) -> Self:
        """Lists what the sources name: all inputs of a night but its bundle."""
        sources, base = config.sources, config.path(".")
        names = (
            sources.user_features,
            sources.item_features,
            sources.user_vectors,
            sources.item_vectors,
        )
        tables = (source_files([name], base) for name in names if name)
        return cls(
            tuple(source_files(sources.interactions, base)),
            tuple(events),
            tuple(chain.from_iterable(tables)),
        )

    @property
    def all(self) -> list[SourceFile]:
        """Interactions, events behind them, then tables."""
        return [*self.interactions, *self.events, *self.tables]


def all_files(config: NightConfig, events: Sequence[SourceFile] = ()) -> list[SourceFile]:
    """All inputs of a night but its bundle: interactions, those of `events` behind them, then tables."""
    return InputFiles.of(config, events).all


def pin(files: Sequence[SourceFile]) -> tuple[str, list[dict[str, object]]]:
    """Digest over contents of all input files, and the list of them for the manifest."""
    file_entries: list[dict[str, object]] = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            size_bytes = file.seek(0, os.SEEK_END)
        file_entries.append({"name": path.name, "size_bytes": size_bytes, "sha256": digest})
    return digest_of(file_entries), file_entries


def digest_of(file_entries: Sequence[Mapping[str, object]]) -> str:
    """Digest over contents of input files, from the list that `pin` made of them."""
    hasher = hashlib.sha256()
    for file_entry in file_entries:
        hasher.update(bytes.fromhex(str(file_entry["sha256"])))
    return hasher.hexdigest()


def copies_in_words(file_entries: Sequence[Mapping[str, object]]) -> list[str]:
    """Remarks on files with the same bytes, of a list that `pin` made; headers alone may well be alike."""
    names: dict[object, list[str]] = {}
    for file_entry in file_entries:
        if int(str(file_entry["size_bytes"])) >= COPY_BYTES_LEAST:
            names.setdefault(file_entry["sha256"], []).append(str(file_entry["name"]))
    return [
        f"{' and '.join(copy_names[:3])} hold the same bytes, so their rows count {len(copy_names)} times: leave one "
        "of them"
        for copy_names in names.values()
        if len(copy_names) > 1
    ]


def find_copy_remarks(files: Sequence[SourceFile]) -> list[str]:
    """The same remarks before a night, from the files of this host that are of one size."""
    sizes: dict[int, list[Path]] = {}
    for file in files:
        if isinstance(file, Path):
            sizes.setdefault(file.stat().st_size, []).append(file)
    alike = [group for size, group in sizes.items() if len(group) > 1 and size >= COPY_BYTES_LEAST]
    looked_at = list(chain.from_iterable(alike))[:COPIES_LOOKED_AT]
    return copies_in_words(pin(looked_at)[1])


def changed_at(file: SourceFile) -> float:
    """Time of a file's last write, Unix seconds."""
    if isinstance(file, Path):
        return file.stat().st_mtime
    with _driver_errors(file.url):
        written: datetime = file.fs.modified(file.url)
        return written.timestamp()


def _local(pattern: str, base: Path, plain_folders: set[str]) -> Iterator[tuple[str, SourceFile]]:
    """Files of this host that a pattern names, each behind what tells it from others, whatever it is called by."""
    storage, full = LocalStorage(), base / pattern
    if full.is_file():
        paths = [full]
    else:
        root = Path(full.anchor) if Path(pattern).is_absolute() else base
        selected = select(storage, str(root), str(full.relative_to(root)))
        paths = [Path(selected.folder, path) for path in selected.paths]
        _demand_some(selected, str(full))
    for path in paths:
        # Not `resolve`: a table's log lies beside the link that is read, too.
        demand_plain_folder(storage, os.path.abspath(path.parent), checked_folders=plain_folders)  # noqa: PTH100
        yield os.path.realpath(path), path


def _remote(url: str, plain_folders: set[str]) -> Iterator[tuple[str, SourceFile]]:
    """Files behind a URL that a pattern names, each behind what tells it from others."""
    fs, path = _file_system(url)
    with _driver_errors(url):
        fs.invalidate_cache()
        if fs.isfile(path):
            names, folder = [path], PurePosixPath(path).parent.as_posix()
        elif "://" in path:  # over HTTP a path is a URL, and a folder a page of links
            names, folder = sorted(fs.glob(path)), ""
            names = [name for name in names if is_data(PurePosixPath(name).name)]
            _demand_some(Selection("", tuple(names)), without_secrets(url))
        else:
            selected = select(RemoteStorage(fs), "/" if path.startswith("/") else "", path)
            _demand_some(selected, without_secrets(url))
            folder = selected.folder
            names = [f"{folder.rstrip('/')}/{below}" for below in selected.paths]
        if "://" not in path:
            demand_plain_folder(RemoteStorage(fs), folder, checked_folders=plain_folders)
        for name in names:
            yield name, RemoteFile(url if name == path else fs.unstrip_protocol(name), fs)


def _demand_some(selected: Selection, pattern_text: str) -> None:
    if selected.paths:
        return
    examples = ", ".join(selected.notes[:3])
    notes = (
        f": what matches are notes of other programs by their names ({examples})"
        if examples
        else ""
    )
    raise SourceError(f"no source file matches {pattern_text}{notes}", pattern=pattern_text)


class RemoteStorage:
    """Storage behind an fsspec URL, whose paths have no protocol."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def children(self, folder: str) -> Iterator[Entry]:
        """Files and folders right in a folder; none where there is no such folder."""
        try:
            entries = self.fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if name != folder.rstrip("/"):
                yield Entry(PurePosixPath(name).name, entry["type"] == "directory")

    def descendants(self, folder: str) -> Iterator[Entry]:
        """Files and folders at any depth, by one listing."""
        entry_by_path = self.fs.find(folder, withdirs=True, detail=True)
        above = folder.strip("/")
        for name, entry in entry_by_path.items():
            if path := name.strip("/").removeprefix(above).strip("/"):
                yield Entry(path, entry["type"] == "directory")

    def exists(self, path: str) -> bool:
        """True if there is a file or a folder of this path."""
        return bool(self.fs.exists(path))


@contextmanager
def _driver_errors(url: str) -> Iterator[None]:
    """Turns what a driver raises beyond what readers know into a StoreError, which is worth another try."""
    try:
        yield
    except (LarderError, OSError, EOFError, UnicodeDecodeError, zlib.error, pa.ArrowException):
        raise
    except Exception as error:
        reason = without_secrets(f"{type(error).__name__}: {error}")
        raise StoreError(f"cannot read {without_secrets(url)}: {reason}") from None


def _file_system(url: str) -> tuple[Any, str]:
    try:
        fs, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SourceError(f"cannot open {url.partition('://')[0]}:// sources: {error}") from error
    return fs, path
