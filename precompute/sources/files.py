"""Files that the sources name, local or behind an fsspec URL: selection of data files, and their digest.

A folder is read with its subfolders, also one that a wildcard matches. Other programs' own files are no data; tables
whose log says which of their files count are refused.
"""

import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, Protocol, Self, TypedDict

import fsspec
import pyarrow as pa

from cache.errors import LarderError, SourceError, StoreError
from cache.format.manifest import EntityKind
from cache.store.object_store import without_secrets
from precompute.config.settings import NightConfig

COPY_BYTES_LEAST = 4096
"""Bytes from which on two files with the same bytes count as copies."""

COPIES_LOOKED_AT = 20
"""Files of equal sizes that are compared before a night."""

_NOTE_BEGINNINGS: Final = (".", "~", "#")
"""Prefixes of other programs' files: hidden ones, lock files (`~$a.csv`), recovery files of editors (`#a.csv#`)."""

_NOTE_ENDINGS: Final = (
    "~", ".bak", ".crc", ".crdownload", ".lck", ".lock", ".part", ".partial", ".swp", ".temp", ".tmp", "._COPYING_",
)  # fmt: skip
"""Endings of backups, locks, checksums, and unfinished files."""

_NOTE_FOLDERS: Final = frozenset({"lost+found"})
_SETTINGS_FILE: Final = "larder.toml"
_WILDCARD: Final = re.compile(r"[*?\[]")
_RECURSIVE: Final = "**"

_TABLE_MARKERS: Final = {
    "_delta_log": "a Delta table", ".hoodie": "a Hudi table", "_spark_metadata": "the output of a Spark stream",
}  # fmt: skip
"""Folders that only a table of this kind has."""

_ICEBERG_METADATA: Final = re.compile(
    r"(v\d+|\d{5}-[0-9a-f-]{36})(\.gz)?\.metadata\.json|version-hint\.text"
)

UTF_8_MARK: Final = b"\xef\xbb\xbf"
IS_UTF_16: Final = "is UTF-16: convert it to UTF-8, e.g. with iconv -f utf-16 -t utf-8"
NOT_GZIP: Final = (
    "is not compressed with gzip, as its name says: give it another name, or compress it"
)
IS_JSON: Final = "JSON is not read: write it as Parquet or CSV"
_CONVERT_REMEDY: Final = "write it as Parquet or CSV"
_UNPACK_REMEDY: Final = "this compression is not read: unpack it, or compress it with gzip"

_REASON_BY_ENDING: Final = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".jl", ".geojson"), IS_JSON),
    **dict.fromkeys(
        (".orc", ".avro", ".feather", ".arrow"), f"only Parquet, CSV and lines are read: {_CONVERT_REMEDY}"
    ),
    **dict.fromkeys((".xls", ".xlsx", ".xlsm", ".ods"), "spreadsheets are not read: save the sheet as CSV in UTF-8"),
    **dict.fromkeys(
        (".pkl", ".pickle", ".h5", ".hdf5", ".sqlite", ".sqlite3", ".db", ".duckdb", ".npy", ".npz", ".mat", ".rds",
         ".xml", ".html", ".yaml", ".yml", ".sql"),
        f"it is not read: {_CONVERT_REMEDY}",
    ),
    **dict.fromkeys(
        (".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".rar", ".br", ".snappy"),
        _UNPACK_REMEDY,
    ),
}  # fmt: skip
"""Ending -> reason why such files are not read, and the remedy."""

_MAGIC: Final = (
    (b"PAR1\x15", "is Parquet by its first bytes: rename it to end in .parquet"),
    (b"\x1f\x8b", "is compressed with gzip by its first bytes: rename it to end in .gz, such as .csv.gz"),
    (b"\x28\xb5\x2f\xfd", "is compressed as zstd: unpack it, or compress it with gzip"),
    (b"BZh91AY&SY", "is compressed as bzip2: unpack it, or compress it with gzip"),
    (b"\xfd7zXZ\x00", "is compressed as xz: unpack it, or compress it with gzip"),
    (b"\x04\x22\x4d\x18", "is compressed as lz4: unpack it, or compress it with gzip"),
    (b"PK\x03\x04", "is an archive or a spreadsheet by its first bytes: unpack it, or save the sheet as CSV in UTF-8"),
    (b"ARROW1\x00", f"is an Arrow file by its first bytes: {_CONVERT_REMEDY}"),
    (b"Obj\x01", f"is Avro by its first bytes: {_CONVERT_REMEDY}"),
    (b"SQLite format 3\x00", f"is an SQLite database by its first bytes: {_CONVERT_REMEDY}"),
)  # fmt: skip
_UTF_32_MARKS: Final = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_UTF_16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
_PAGE_STARTS: Final = (b"<!doctype", b"<html", b"<?xml")
_BLANKS: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File behind an fsspec URL, with as much of a path's interface as readers use."""

    url: str
    fs: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Part of the URL after the last slash."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """Last suffix of the URL, like a path's."""
        return PurePosixPath(self.url).suffix

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the URL, like a path's."""
        return PurePosixPath(self.url).suffixes

    @contextmanager
    def open(self, _mode: str = "rb") -> Iterator[BinaryIO]:
        """Open the file for reading bytes, with seeking. Raises StoreError for its driver's errors, also later ones."""
        with _driver_errors(self.url), self.fs.open(self.url, "rb") as opened:
            yield opened

    def __str__(self) -> str:
        return without_secrets(self.url)


SourceFile = Path | RemoteFile


@contextmanager
def readable(file: SourceFile) -> Iterator[Any]:
    """Yield input for Arrow's readers: the path of a local file, which they map, or an open remote one."""
    if isinstance(file, Path):
        yield file
        return
    with file.open() as raw:
        arrow_file = pa.PythonFile(raw, mode="r")
        yield pa.CompressedInputStream(arrow_file, "gzip") if file.suffix == ".gz" else arrow_file


def source_file(name: str, base: Path) -> SourceFile:
    """Return the file of this name, an URL or a path relative to `base`, without checking that it exists.

    Raises SourceError for a folder, and for a pattern that is the name of no file.
    """
    is_local = "://" not in name
    is_pattern = "*" in name and not (is_local and (base / name).exists())
    if is_pattern or (is_local and (base / name).is_dir()):
        raise SourceError(
            f"{name} is a {'pattern of files' if is_pattern else 'folder'}: features and vectors are read from one "
            "Parquet file, so write them into one and name that in [sources]"
        )
    if is_local:
        return base / name
    return RemoteFile(name, _file_system(name)[0])


def feature_file(config: NightConfig, entity: EntityKind, column: str) -> SourceFile:
    """Return the file of an entity's features; raise SourceError if none is configured for a model's `column`."""
    name = f"{entity}_features"
    if not (file := getattr(config.sources, name)):
        raise SourceError(
            f"the model wants the {entity} feature {column!r}, but sources.{name} is not set",
            column=column,
        )
    return source_file(file, config.path("."))


def source_files(patterns: Sequence[str], base: Path) -> list[SourceFile]:
    """Return the files that the patterns name, sorted within each, without repetitions.

    `select_files` says which files of a folder are data, and which tables are refused. Raises SourceError for a
    pattern without a file.
    """
    file_by_identity: dict[str, SourceFile] = {}
    plain_folders: set[str] = set()
    for pattern in patterns:
        is_remote = "://" in pattern
        named = (
            _remote_files(pattern, plain_folders)
            if is_remote
            else _local_files(pattern, base, plain_folders)
        )
        for identity, file in named:
            file_by_identity.setdefault(identity, file)
    return list(file_by_identity.values())


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Input files of a night as listed at its start: files that arrive later are for the next night."""

    interactions: tuple[SourceFile, ...] = ()
    events: tuple[SourceFile, ...] = ()
    tables: tuple[SourceFile, ...] = ()

    @classmethod
    def of(cls, config: NightConfig, events: Sequence[SourceFile] = ()) -> Self:
        """List all input files of a night but its bundle."""
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
    """Return all inputs of a night but its bundle: interactions, then those of `events`, then tables."""
    return InputFiles.of(config, events).all


class InputEntry(TypedDict):
    """Input file of a night, as its report and the manifest list it."""

    name: str
    size_bytes: int
    sha256: str


def pin(files: Sequence[SourceFile]) -> tuple[str, list[InputEntry]]:
    """Return the digest over the contents of all input files, and their list for the manifest."""
    file_entries: list[InputEntry] = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            size_bytes = file.seek(0, os.SEEK_END)
        file_entries.append({"name": path.name, "size_bytes": size_bytes, "sha256": digest})
    return digest_of(file_entries), file_entries


def digest_of(file_entries: Sequence[InputEntry]) -> str:
    """Return the digest over the contents of input files, from the list that `pin` made."""
    hasher = hashlib.sha256()
    for file_entry in file_entries:
        hasher.update(bytes.fromhex(file_entry["sha256"]))
    return hasher.hexdigest()


def copies_in_words(file_entries: Sequence[InputEntry]) -> list[str]:
    """Return remarks on files with the same bytes in a list of `pin`; small ones, such as headers, may be alike."""
    names: dict[str, list[str]] = {}
    for file_entry in file_entries:
        if file_entry["size_bytes"] >= COPY_BYTES_LEAST:
            names.setdefault(file_entry["sha256"], []).append(file_entry["name"])
    return [
        f"{' and '.join(copy_names[:3])} hold the same bytes, so their rows count {len(copy_names)} times: leave one "
        "of them"
        for copy_names in names.values()
        if len(copy_names) > 1
    ]


def find_copy_remarks(files: Sequence[SourceFile]) -> list[str]:
    """Return the remarks on copies before a night, from this host's files of equal size."""
    sizes: dict[int, list[Path]] = {}
    for file in files:
        if isinstance(file, Path):
            sizes.setdefault(file.stat().st_size, []).append(file)
    alike = [group for size, group in sizes.items() if len(group) > 1 and size >= COPY_BYTES_LEAST]
    looked_at = list(chain.from_iterable(alike))[:COPIES_LOOKED_AT]
    return copies_in_words(pin(looked_at)[1])


def changed_at(file: SourceFile) -> float:
    """Return the time of a file's last write, Unix seconds."""
    if isinstance(file, Path):
        return file.stat().st_mtime
    with _driver_errors(file.url):
        written: datetime = file.fs.modified(file.url)
        return written.timestamp()


class FolderEntry(NamedTuple):
    """File or folder by its path below the listed folder, with slashes."""

    path: str
    is_folder: bool


class Storage(Protocol):
    """Interface of a file system that lists folders, local or behind a URL. Paths are its own, with slashes."""

    def children(self, folder: str) -> Iterable[FolderEntry]:
        """Yield files and folders directly in a folder; none if the folder does not exist."""
        ...

    def descendants(self, folder: str) -> Iterable[FolderEntry]:
        """Yield files and folders at any depth of a folder; it may skip other programs' own folders."""
        ...

    def exists(self, path: str) -> bool:
        """True if a file or folder has this path."""
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Paths below `folder` that a pattern names, sorted; `notes` matched it, too, but are no data."""

    folder: str
    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()


def select_files(storage: Storage, folder: str, pattern: str) -> Selection:
    """Select the data files below a folder that a pattern of parts with slashes names; no wildcard: all of that folder.

    Raises SourceError for a table whose log says which of its files count.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    folder, parts = _without_fixed(storage, folder, parts)
    tables: dict[str, str] = {}
    literal = frozenset(part for part in parts if not _WILDCARD.search(part))
    data_paths: set[str] = set()
    notes: set[str] = set()
    for entry in _walk(storage, folder, "", parts):
        if (marked := _marked_table(entry)) is not None:
            tables[marked[0]] = marked[1]
        *folders, name = path = entry.path.split("/")
        if entry.is_folder or not _is_named(path, parts):
            continue
        holds_data = (name in literal or is_data(name)) and all(
            part in literal or is_data(part, is_folder=True) for part in folders
        )
        (data_paths if holds_data else notes).add(entry.path)
    for table, kind in tables.items():
        if any(_is_within(path, table) for path in data_paths):
            raise refused_table(f"{folder}/{table}".rstrip("/"), kind)
    by_parts = sorted(data_paths, key=lambda path: path.split("/"))
    return Selection(folder, tuple(by_parts), tuple(sorted(notes)))


def _without_fixed(storage: Storage, folder: str, parts: Sequence[str]) -> tuple[str, list[str]]:
    """Return (folder of a pattern's fixed first parts, remaining parts); a name with brackets may be a folder's."""
    remaining_parts = list(parts)
    while remaining_parts:
        part = remaining_parts[0]
        joined = part if not folder else f"{folder.rstrip('/')}/{part}"
        if _WILDCARD.search(part) and ("*" in part or not storage.exists(joined)):
            break
        folder, remaining_parts = joined, remaining_parts[1:]
    return folder, remaining_parts or [_RECURSIVE]


def _walk(storage: Storage, root: str, below: str, parts: Sequence[str]) -> Iterator[FolderEntry]:
    """Yield entries that the remaining pattern may name, and those that mark a folder as a table with a log."""
    folder = f"{root.rstrip('/')}/{below}".rstrip("/") or root
    prefix = f"{below}/" if below else ""
    if not parts or parts[0] == _RECURSIVE:
        for entry in storage.descendants(folder):
            yield FolderEntry(prefix + entry.path, entry.is_folder)
        return
    for entry in storage.children(folder):
        yield FolderEntry(prefix + entry.path, entry.is_folder)
        if entry.is_folder and entry.path == "metadata":
            for metadata_entry in storage.children(f"{folder}/metadata"):
                yield FolderEntry(
                    f"{prefix}metadata/{metadata_entry.path}", metadata_entry.is_folder
                )
        if entry.is_folder and fnmatchcase(entry.path, parts[0]):
            yield from _walk(storage, root, prefix + entry.path, parts[1:])


def _is_named(path: Sequence[str], parts: Sequence[str]) -> bool:
    """True if a pattern's parts name the path, or a folder above it."""
    if not parts or not path:
        return not parts
    if parts[0] == _RECURSIVE:
        return any(_is_named(path[skipped:], parts[1:]) for skipped in range(len(path)))
    return fnmatchcase(path[0], parts[0]) and _is_named(path[1:], parts[1:])


def _marked_table(entry: FolderEntry) -> tuple[str, str] | None:
    """Return (folder of the table, its kind) if an entry belongs to a table's log."""
    *above, name = entry.path.split("/")
    if entry.is_folder and name in _TABLE_MARKERS:
        return "/".join(above), _TABLE_MARKERS[name]
    if not entry.is_folder and above[-1:] == ["metadata"] and _ICEBERG_METADATA.fullmatch(name):
        return "/".join(above[:-1]), "an Iceberg table"
    return None


def _is_within(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def is_data(name: str, *, is_folder: bool = False) -> bool:
    """True if a file, or a folder, of this name holds data: prefix and ending are not another program's.

    Folders such as `_day=1` are values of a partition.
    """
    if name.startswith("_"):
        return is_folder and "=" in name
    if name.startswith(_NOTE_BEGINNINGS):
        return False
    if is_folder:
        return name not in _NOTE_FOLDERS
    return name != _SETTINGS_FILE and not name.endswith(_NOTE_ENDINGS)


def tables_among(entries: Iterable[FolderEntry]) -> dict[str, str]:
    """Return folder -> kind of each table that has a log among the entries."""
    return dict(filter(None, map(_marked_table, entries)))


def demand_plain_folder(storage: Storage, folder: str, *, checked_folders: set[str]) -> None:
    """Raise SourceError if a folder, or one above it, is a table whose log says which of its files count.

    Folders in `checked_folders` are skipped, and those checked are added.
    """
    path = PurePosixPath(folder)
    for folder_path in (path, *path.parents):
        if str(folder_path) in checked_folders:
            return
        checked_folders.add(str(folder_path))
        try:
            kind = _kind_of_table(storage, str(folder_path))
        except Exception:  # who may read the files may not be allowed to look at folders above them
            return
        if kind is not None:
            raise refused_table(str(folder_path), kind)


def _kind_of_table(storage: Storage, folder: str) -> str | None:
    for name, kind in _TABLE_MARKERS.items():
        if storage.exists(f"{folder}/{name}"):
            return kind
    metadata = storage.children(f"{folder}/metadata")
    is_iceberg = any(_ICEBERG_METADATA.fullmatch(entry.path) for entry in metadata)
    return "an Iceberg table" if is_iceberg else None


def refused_table(folder: str, kind: str) -> SourceError:
    """Return the error for a table whose log says which of its files count."""
    return SourceError(
        f"{folder} is {kind}: its log says which of its files count, and Larder does not read that log. Write its rows "
        "as Parquet files into a folder of their own (Spark: df.write.parquet(...)) and name that",
        path=folder,
    )


def _local_files(
    pattern: str, base: Path, plain_folders: set[str]
) -> Iterator[tuple[str, SourceFile]]:
    """Yield the local files that a pattern names, each with its real path, which identifies it."""
    storage, full = LocalStorage(), base / pattern
    if full.is_file():
        paths = [full]
    else:
        root = Path(full.anchor) if Path(pattern).is_absolute() else base
        selected = select_files(storage, str(root), str(full.relative_to(root)))
        paths = [Path(selected.folder, path) for path in selected.paths]
        _demand_some(selected, str(full))
    for path in paths:
        # Not `resolve`: a table's log lies beside the link that is read, too.
        demand_plain_folder(storage, os.path.abspath(path.parent), checked_folders=plain_folders)  # noqa: PTH100
        yield os.path.realpath(path), path


def _remote_files(url: str, plain_folders: set[str]) -> Iterator[tuple[str, SourceFile]]:
    """Yield the files behind a URL that a pattern names, each with a key that identifies it."""
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
            selected = select_files(RemoteStorage(fs), "/" if path.startswith("/") else "", path)
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


class LocalStorage:
    """File system of this host; links are followed, except for one to a folder above it."""

    def children(self, folder: str) -> Iterator[FolderEntry]:
        """Yield files and folders directly in a folder."""
        yield from (FolderEntry(dir_entry.name, dir_entry.is_dir()) for dir_entry in _scan(folder))

    def descendants(self, folder: str) -> Iterator[FolderEntry]:
        """Yield files and folders at any depth, without the contents of other programs' own folders."""
        return self._below(folder, "", frozenset({os.path.realpath(folder)}))

    def exists(self, path: str) -> bool:
        """True if a file or folder has this path."""
        return Path(path).exists()

    def _below(self, folder: str, prefix: str, above: frozenset[str]) -> Iterator[FolderEntry]:
        for dir_entry in sorted(_scan(folder), key=lambda dir_entry: dir_entry.name):
            path, is_folder = prefix + dir_entry.name, dir_entry.is_dir()
            if not is_folder and not dir_entry.is_file():
                continue
            yield FolderEntry(path, is_folder)
            if is_folder and is_data(dir_entry.name, is_folder=True):
                real = os.path.realpath(dir_entry.path)
                if real not in above:  # a link to a folder above it
                    yield from self._below(dir_entry.path, f"{path}/", above | {real})


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise SourceError(
            f"{folder} cannot be listed: {error.strerror}; may this user read it?", path=folder
        ) from None


class RemoteStorage:
    """Storage behind an fsspec URL, whose paths have no protocol."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def children(self, folder: str) -> Iterator[FolderEntry]:
        """Yield files and folders directly in a folder; none if the folder does not exist."""
        try:
            entries = self.fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if name != folder.rstrip("/"):
                yield FolderEntry(PurePosixPath(name).name, entry["type"] == "directory")

    def descendants(self, folder: str) -> Iterator[FolderEntry]:
        """Yield files and folders at any depth, by one listing."""
        entry_by_path = self.fs.find(folder, withdirs=True, detail=True)
        above = folder.strip("/")
        for name, entry in entry_by_path.items():
            if path := name.strip("/").removeprefix(above).strip("/"):
                yield FolderEntry(path, entry["type"] == "directory")

    def exists(self, path: str) -> bool:
        """True if a file or folder has this path."""
        return bool(self.fs.exists(path))


@contextmanager
def _driver_errors(url: str) -> Iterator[None]:
    """Raise StoreError for a driver's error that readers do not know; the step may be retried."""
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


def unreadable_by_name(name: str) -> str | None:
    """Return the reason why files of this name are not read, None if the name is fine."""
    base_name = name.lower().removesuffix(".gz")
    return next(
        (reason for ending, reason in _REASON_BY_ENDING.items() if base_name.endswith(ending)), None
    )


def unreadable_by_text(head: bytes) -> str | None:
    """Return the reason why a file with these first bytes is no UTF-8 text table, None if it may be one."""
    for magic, reason in _MAGIC:
        if head.startswith(magic):
            return reason
    if head.startswith(_UTF_32_MARKS):
        return "is UTF-32: convert it to UTF-8, e.g. with iconv -f utf-32 -t utf-8"
    if head.startswith(_UTF_16_MARKS):
        return IS_UTF_16
    begin = head[:4096]
    while begin.startswith(UTF_8_MARK):
        begin = begin.removeprefix(UTF_8_MARK)
    if b"\x00" in begin.partition(b"\n")[0]:
        return "has zero bytes in its first line: if it is UTF-16, convert it, e.g. with iconv -f utf-16le -t utf-8"
    start = begin.lstrip(_BLANKS)
    if start.lower().startswith(_PAGE_STARTS):
        return "is a page of HTML or XML: is it what you meant to download?"
    if (start[:1] == b"{" and start[1:].lstrip(_BLANKS)[:1] in (b'"', b"}")) or (
        start[:1] == b"[" and start[1:].lstrip(_BLANKS)[:1] in (b"{", b"[", b'"')
    ):
        return f"looks like JSON: {IS_JSON}"
    return None


def holds_data_unread(name: str) -> bool:
    """True if a file that is not read holds data by its name; other ones, such as settings, may be JSON, too."""
    base_name = name.lower().removesuffix(".gz")
    if base_name.endswith((".jsonl", ".ndjson", ".jl", ".orc", ".avro", ".feather", ".arrow")):
        return True
    stem = base_name.rpartition(".")[0]
    return _REASON_BY_ENDING.get(
        f".{base_name.rpartition('.')[2]}"
    ) == _UNPACK_REMEDY and stem.endswith(
        (".csv", ".tsv", ".parquet", ".txt", ".json", ".jsonl", ".ndjson")
    )


def looks_like_rows(head: bytes) -> str | None:
    """Return the separator that all first lines have equally often, None if there is none."""
    lines = [line for line in head.split(b"\n")[:20] if line.strip()]
    if len(lines) > 2 and not head.endswith(b"\n"):
        lines.pop()
    for sign in (b"::", b"\t", b",", b";", b"|", b"\x01"):
        counts = {line.count(sign) for line in lines}
        if len(counts) == 1 and counts != {0} and (len(lines) > 1 or sign == b"\t"):
            return sign.decode()
    return None


def name_of_sign(sign: str) -> str:
    """Return a separator as messages name it."""
    return {"\t": "a tab", "\x01": "the sign \\u0001"}.get(sign, repr(sign))


def is_gzip(path: Path) -> bool:
    """True if a file begins like one of gzip."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
