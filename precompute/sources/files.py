"""Files that the sources name, local or behind an fsspec URL: selection of data files, and their digest.

Folders are read with their subfolders, also folders that a wildcard matches. Files of other programs, such as lock
files, are ignored. Table formats whose log lists the valid files are refused.
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

COPY_BYTES_MIN = 4096
"""Smallest size of files with the same bytes that count as copies."""

COMPARED_COPIES_MAX = 20
"""Most files of equal sizes that are compared before a night."""

_NOTE_PREFIXES: Final = (".", "~", "#")
"""Name prefixes of other programs' files: hidden files, lock files (`~$a.csv`), editors' recovery files (`#a.csv#`)."""

_NOTE_SUFFIXES: Final = (
    "~", ".bak", ".crc", ".crdownload", ".lck", ".lock", ".part", ".partial", ".swp", ".temp", ".tmp", "._COPYING_",
)  # fmt: skip
"""Name endings of backups, locks, checksums, and unfinished files."""

_NOTE_FOLDER_NAMES: Final = frozenset({"lost+found"})
_SETTINGS_FILE_NAME: Final = "larder.toml"
_WILDCARD_PATTERN: Final = re.compile(r"[*?\[]")
_RECURSIVE_WILDCARD: Final = "**"

_TABLE_KIND_BY_FOLDER: Final = {
    "_delta_log": "a Delta table", ".hoodie": "a Hudi table", "_spark_metadata": "the output of a Spark stream",
}  # fmt: skip
"""Folder name that only a table of this kind has -> the kind."""

_ICEBERG_METADATA_PATTERN: Final = re.compile(r"(v\d+|\d{5}-[0-9a-f-]{36})(\.gz)?\.metadata\.json|version-hint\.text")

UTF_8_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
UTF_16_REASON: Final = "is UTF-16: convert it to UTF-8, e.g. with iconv -f utf-16 -t utf-8"
NOT_GZIP_REASON: Final = "is not compressed with gzip, as its name says: give it another name, or compress it"
JSON_REASON: Final = "JSON is not read: write it as Parquet or CSV"
_CONVERT_REMEDY: Final = "write it as Parquet or CSV"
_UNPACK_REMEDY: Final = "this compression is not read: unpack it, or compress it with gzip"

_REASON_BY_ENDING: Final = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".jl", ".geojson"), JSON_REASON),
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
"""File name ending -> reason why such files are not read, with the remedy."""

_REASON_BY_FIRST_BYTES: Final = (
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
_UTF_32_BYTE_ORDER_MARKS: Final = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_UTF_16_BYTE_ORDER_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
_MARKUP_PREFIXES: Final = (b"<!doctype", b"<html", b"<?xml")
_BLANK_BYTES: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File behind an fsspec URL, with the part of a path's interface that readers use."""

    url: str
    file_system: Any = field(compare=False, repr=False)

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
        """All suffixes of the URL, like a path's."""
        return PurePosixPath(self.url).suffixes

    @contextmanager
    def open(self, _mode: str = "rb") -> Iterator[BinaryIO]:
        """Open the file for reading bytes, with seeking; raise StoreError for errors of its driver, also later ones."""
        with _driver_errors(self.url), self.file_system.open(self.url, "rb") as opened:
            yield opened

    def __str__(self) -> str:
        return without_secrets(self.url)


SourceFile = Path | RemoteFile


@contextmanager
def open_for_arrow(file: SourceFile) -> Iterator[Any]:
    """Yield the input for Arrow's readers: the path of a local file, which they map, or an open remote file."""
    if isinstance(file, Path):
        yield file
        return
    with file.open() as raw:
        arrow_file = pa.PythonFile(raw, mode="r")
        yield pa.CompressedInputStream(arrow_file, "gzip") if file.suffix == ".gz" else arrow_file


def source_file(file_name: str, base_folder: Path) -> SourceFile:
    """Return the file of this name, a URL or a path relative to `base_folder`; it need not exist.

    Raises SourceError for a folder, and for a pattern that is not itself the name of a file.
    """
    is_local = "://" not in file_name
    is_pattern = "*" in file_name and not (is_local and (base_folder / file_name).exists())
    if is_pattern or (is_local and (base_folder / file_name).is_dir()):
        raise SourceError(
            f"{file_name} is a {'pattern of files' if is_pattern else 'folder'}: features and vectors are read from "
            "one "
            "Parquet file, so write them into one and name that in [sources]"
        )
    if is_local:
        return base_folder / file_name
    return RemoteFile(file_name, _file_system(file_name)[0])


def feature_file(config: NightConfig, entity: EntityKind, model_column: str) -> SourceFile:
    """Return the file of an entity's features; raise SourceError if none is configured for a model's `model_column`."""
    setting_name = f"{entity}_features"
    if not (file_name := getattr(config.sources, setting_name)):
        raise SourceError(
            f"the model takes the {entity} feature {model_column!r}, but sources.{setting_name} is not set",
            column=model_column,
        )
    return source_file(file_name, config.path("."))


def source_files(patterns: Sequence[str], base_folder: Path) -> list[SourceFile]:
    """Return the files that the patterns name, sorted within each pattern, without repetitions.

    On data files in folders and refused tables, see `select_files`. Raises SourceError for a pattern without a file.
    """
    file_by_identity: dict[str, SourceFile] = {}
    checked_folders: set[str] = set()
    for pattern in patterns:
        is_remote = "://" in pattern
        identified_files = (
            _remote_files(pattern, checked_folders)
            if is_remote
            else _local_files(pattern, base_folder, checked_folders)
        )
        for identity, file in identified_files:
            file_by_identity.setdefault(identity, file)
    return list(file_by_identity.values())


@dataclass(frozen=True, slots=True)
class InputFiles:
    """Input files of a night as listed at its start; files that arrive later are for the next night."""

    interaction_files: tuple[SourceFile, ...] = ()
    event_files: tuple[SourceFile, ...] = ()
    table_files: tuple[SourceFile, ...] = ()

    @classmethod
    def of(cls, config: NightConfig, event_files: Sequence[SourceFile] = ()) -> Self:
        """List all input files of a night except its bundle."""
        sources, base = config.sources, config.path(".")
        table_names = (sources.user_features, sources.item_features, sources.user_vectors, sources.item_vectors)
        table_files = (source_files([table_name], base) for table_name in table_names if table_name)
        return cls(
            tuple(source_files(sources.interactions, base)), tuple(event_files), tuple(chain.from_iterable(table_files))
        )

    @property
    def all_files(self) -> list[SourceFile]:
        """All files: interactions, then events, then tables."""
        return [*self.interaction_files, *self.event_files, *self.table_files]


def all_input_files(config: NightConfig, event_files: Sequence[SourceFile] = ()) -> list[SourceFile]:
    """Return all input files of a night except its bundle: interactions, then `event_files`, then tables."""
    return InputFiles.of(config, event_files).all_files


class InputEntry(TypedDict):
    """Input file of a night, as its report and the manifest list it."""

    name: str
    size_bytes: int
    sha256: str


def digest_files(files: Sequence[SourceFile]) -> tuple[str, list[InputEntry]]:
    """Return the digest over the contents of the files, and their list for the manifest."""
    file_entries: list[InputEntry] = []
    for path in files:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            size_bytes = file.seek(0, os.SEEK_END)
        file_entries.append({"name": path.name, "size_bytes": size_bytes, "sha256": sha256})
    return digest_of(file_entries), file_entries


def digest_of(file_entries: Sequence[InputEntry]) -> str:
    """Return the digest over the contents of the listed files."""
    digest_hasher = hashlib.sha256()
    for file_entry in file_entries:
        digest_hasher.update(bytes.fromhex(file_entry["sha256"]))
    return digest_hasher.hexdigest()


def copies_remarks(file_entries: Sequence[InputEntry]) -> list[str]:
    """Return remarks on listed files with the same bytes; small files, such as headers alone, are ignored."""
    names_by_sha256: dict[str, list[str]] = {}
    for file_entry in file_entries:
        if file_entry["size_bytes"] >= COPY_BYTES_MIN:
            names_by_sha256.setdefault(file_entry["sha256"], []).append(file_entry["name"])
    return [
        f"{' and '.join(copy_names[:3])} hold the same bytes, so their rows count {len(copy_names)} times: keep one "
        "of them"
        for copy_names in names_by_sha256.values()
        if len(copy_names) > 1
    ]


def find_copy_remarks(files: Sequence[SourceFile]) -> list[str]:
    """Return remarks on copies before a night, comparing local files of equal size."""
    files_by_size: dict[int, list[Path]] = {}
    for file in files:
        if isinstance(file, Path):
            files_by_size.setdefault(file.stat().st_size, []).append(file)
    same_size_groups = [group for size, group in files_by_size.items() if len(group) > 1 and size >= COPY_BYTES_MIN]
    compared_files = list(chain.from_iterable(same_size_groups))[:COMPARED_COPIES_MAX]
    return copies_remarks(digest_files(compared_files)[1])


def modified_at(file: SourceFile) -> float:
    """Return the time of a file's last write, Unix seconds."""
    if isinstance(file, Path):
        return file.stat().st_mtime
    with _driver_errors(file.url):
        written: datetime = file.file_system.modified(file.url)
        return written.timestamp()


class FolderEntry(NamedTuple):
    """File or folder by its path below the listed folder, with slashes."""

    path: str
    is_folder: bool


class FolderStorage(Protocol):
    """Interface of a file system that lists folders, local or behind a URL; paths use its own syntax, with slashes."""

    def children(self, folder: str) -> Iterable[FolderEntry]:
        """Yield the files and folders directly in a folder; none if the folder does not exist."""
        ...

    def descendants(self, folder: str) -> Iterable[FolderEntry]:
        """Yield the files and folders at any depth of a folder; folders of other programs may be skipped."""
        ...

    def exists(self, path: str) -> bool:
        """True if a file or folder has this path."""
        ...


@dataclass(frozen=True, slots=True)
class SelectedPaths:
    """Paths below `folder` that a pattern names, sorted; `note_paths` match it but are other programs' files."""

    folder: str
    data_paths: tuple[str, ...]
    note_paths: tuple[str, ...] = ()


def select_files(storage: FolderStorage, folder: str, pattern: str) -> SelectedPaths:
    """Select the data files below a folder that match a pattern; a pattern without wildcards selects its whole folder.

    Raises SourceError for a table whose log lists the valid files.
    """
    pattern_parts = [pattern_part for pattern_part in pattern.split("/") if pattern_part not in ("", ".")]
    folder, pattern_parts = _split_fixed_folder(storage, folder, pattern_parts)
    kind_by_table: dict[str, str] = {}
    literal_parts = frozenset(
        pattern_part for pattern_part in pattern_parts if not _WILDCARD_PATTERN.search(pattern_part)
    )
    data_paths: set[str] = set()
    note_paths: set[str] = set()
    for entry in _walk_matching(storage, folder, "", pattern_parts):
        if (marked_table := _marked_table(entry)) is not None:
            kind_by_table[marked_table[0]] = marked_table[1]
        *folders, name = path = entry.path.split("/")
        if entry.is_folder or not _matches_pattern(path, pattern_parts):
            continue
        holds_data = (name in literal_parts or is_data_name(name)) and all(
            pattern_part in literal_parts or is_data_name(pattern_part, is_folder=True) for pattern_part in folders
        )
        (data_paths if holds_data else note_paths).add(entry.path)
    for table_folder, kind in kind_by_table.items():
        if any(_is_within(path, table_folder) for path in data_paths):
            raise refused_table_error(f"{folder}/{table_folder}".rstrip("/"), kind)
    sorted_paths = sorted(data_paths, key=lambda path: path.split("/"))
    return SelectedPaths(folder, tuple(sorted_paths), tuple(sorted(note_paths)))


def _split_fixed_folder(storage: FolderStorage, folder: str, pattern_parts: Sequence[str]) -> tuple[str, list[str]]:
    """Return (folder of the pattern's leading parts without wildcards, remaining parts).

    A part with brackets counts as fixed if a folder has that name.
    """
    remaining_parts = list(pattern_parts)
    while remaining_parts:
        part = remaining_parts[0]
        joined_folder = part if not folder else f"{folder.rstrip('/')}/{part}"
        if _WILDCARD_PATTERN.search(part) and ("*" in part or not storage.exists(joined_folder)):
            break
        folder, remaining_parts = joined_folder, remaining_parts[1:]
    return folder, remaining_parts or [_RECURSIVE_WILDCARD]


def _walk_matching(
    storage: FolderStorage, root_folder: str, relative_folder: str, pattern_parts: Sequence[str]
) -> Iterator[FolderEntry]:
    """Yield the entries that the remaining pattern may match, and entries that mark a folder as a table with a log."""
    folder = f"{root_folder.rstrip('/')}/{relative_folder}".rstrip("/") or root_folder
    prefix = f"{relative_folder}/" if relative_folder else ""
    if not pattern_parts or pattern_parts[0] == _RECURSIVE_WILDCARD:
        for entry in storage.descendants(folder):
            yield FolderEntry(prefix + entry.path, entry.is_folder)
        return
    for entry in storage.children(folder):
        yield FolderEntry(prefix + entry.path, entry.is_folder)
        if entry.is_folder and entry.path == "metadata":
            for metadata_entry in storage.children(f"{folder}/metadata"):
                yield FolderEntry(f"{prefix}metadata/{metadata_entry.path}", metadata_entry.is_folder)
        if entry.is_folder and fnmatchcase(entry.path, pattern_parts[0]):
            yield from _walk_matching(storage, root_folder, prefix + entry.path, pattern_parts[1:])


def _matches_pattern(path_parts: Sequence[str], pattern_parts: Sequence[str]) -> bool:
    """True if a pattern's parts match the path, or a folder above it."""
    if not pattern_parts or not path_parts:
        return not pattern_parts
    if pattern_parts[0] == _RECURSIVE_WILDCARD:
        return any(
            _matches_pattern(path_parts[skipped_count:], pattern_parts[1:]) for skipped_count in range(len(path_parts))
        )
    return fnmatchcase(path_parts[0], pattern_parts[0]) and _matches_pattern(path_parts[1:], pattern_parts[1:])


def _marked_table(entry: FolderEntry) -> tuple[str, str] | None:
    """Return (folder of the table, its kind) if an entry belongs to a table's log."""
    *parent_folders, name = entry.path.split("/")
    if entry.is_folder and name in _TABLE_KIND_BY_FOLDER:
        return "/".join(parent_folders), _TABLE_KIND_BY_FOLDER[name]
    if not entry.is_folder and parent_folders[-1:] == ["metadata"] and _ICEBERG_METADATA_PATTERN.fullmatch(name):
        return "/".join(parent_folders[:-1]), "an Iceberg table"
    return None


def _is_within(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def is_data_name(file_name: str, *, is_folder: bool = False) -> bool:
    """True if a file or folder of this name holds data, by its prefix and ending.

    Folders such as `_day=1` hold a partition's data.
    """
    if file_name.startswith("_"):
        return is_folder and "=" in file_name
    if file_name.startswith(_NOTE_PREFIXES):
        return False
    if is_folder:
        return file_name not in _NOTE_FOLDER_NAMES
    return file_name != _SETTINGS_FILE_NAME and not file_name.endswith(_NOTE_SUFFIXES)


def table_kind_by_folder(entries: Iterable[FolderEntry]) -> dict[str, str]:
    """Return folder -> kind of each table that has a log among the entries."""
    return dict(filter(None, map(_marked_table, entries)))


def demand_plain_folder(storage: FolderStorage, folder: str, *, checked_folders: set[str]) -> None:
    """Raise SourceError if a folder, or one above it, is a table whose log lists the valid files.

    Folders in `checked_folders` are skipped; newly checked folders are added.
    """
    path = PurePosixPath(folder)
    for folder_path in (path, *path.parents):
        if str(folder_path) in checked_folders:
            return
        checked_folders.add(str(folder_path))
        try:
            kind = _table_kind_of(storage, str(folder_path))
        except Exception:  # the user may lack permission to list the folders above
            return
        if kind is not None:
            raise refused_table_error(str(folder_path), kind)


def _table_kind_of(storage: FolderStorage, folder: str) -> str | None:
    for name, kind in _TABLE_KIND_BY_FOLDER.items():
        if storage.exists(f"{folder}/{name}"):
            return kind
    metadata_entries = storage.children(f"{folder}/metadata")
    is_iceberg = any(_ICEBERG_METADATA_PATTERN.fullmatch(entry.path) for entry in metadata_entries)
    return "an Iceberg table" if is_iceberg else None


def refused_table_error(folder: str, table_kind: str) -> SourceError:
    """Return the error for a table whose log lists the valid files."""
    return SourceError(
        f"{folder} is {table_kind}: its log lists the valid files, and Larder does not read that log. Write its rows "
        "as Parquet files into a folder of their own (Spark: df.write.parquet(...)) and name that",
        path=folder,
    )


def _local_files(pattern: str, base_folder: Path, checked_folders: set[str]) -> Iterator[tuple[str, SourceFile]]:
    """Yield the local files that a pattern names, each with its real path, which identifies it."""
    storage, full_path = LocalStorage(), base_folder / pattern
    if full_path.is_file():
        paths = [full_path]
    else:
        root_folder = Path(full_path.anchor) if Path(pattern).is_absolute() else base_folder
        selection = select_files(storage, str(root_folder), str(full_path.relative_to(root_folder)))
        paths = [Path(selection.folder, path) for path in selection.data_paths]
        _demand_matches(selection, str(full_path))
    for path in paths:
        # Unlike `resolve`, this keeps links: a table's log may also be beside the link that is read.
        demand_plain_folder(storage, os.path.abspath(path.parent), checked_folders=checked_folders)  # noqa: PTH100
        yield os.path.realpath(path), path


def _remote_files(url: str, checked_folders: set[str]) -> Iterator[tuple[str, SourceFile]]:
    """Yield the files behind a URL that a pattern names, each with a key that identifies it."""
    fs, path = _file_system(url)
    with _driver_errors(url):
        fs.invalidate_cache()
        if fs.isfile(path):
            file_paths, folder = [path], PurePosixPath(path).parent.as_posix()
        elif "://" in path:  # over HTTP a path is a URL, and a folder is a page of links
            file_paths, folder = sorted(fs.glob(path)), ""
            file_paths = [name for name in file_paths if is_data_name(PurePosixPath(name).name)]
            _demand_matches(SelectedPaths("", tuple(file_paths)), without_secrets(url))
        else:
            selection = select_files(RemoteStorage(fs), "/" if path.startswith("/") else "", path)
            _demand_matches(selection, without_secrets(url))
            folder = selection.folder
            file_paths = [f"{folder.rstrip('/')}/{relative_path}" for relative_path in selection.data_paths]
        if "://" not in path:
            demand_plain_folder(RemoteStorage(fs), folder, checked_folders=checked_folders)
        for file_path in file_paths:
            yield (file_path, RemoteFile(url if file_path == path else fs.unstrip_protocol(file_path), fs))


def _demand_matches(selection: SelectedPaths, pattern_text: str) -> None:
    if selection.data_paths:
        return
    examples = ", ".join(selection.note_paths[:3])
    notes_text = f": only files of other programs match, by their names ({examples})" if examples else ""
    raise SourceError(f"no source file matches {pattern_text}{notes_text}", pattern=pattern_text)


class LocalStorage:
    """File system of this host; links are followed, except links to a folder above."""

    def children(self, folder: str) -> Iterator[FolderEntry]:
        """Yield files and folders directly in a folder."""
        yield from (FolderEntry(dir_entry.name, dir_entry.is_dir()) for dir_entry in _list_folder(folder))

    def descendants(self, folder: str) -> Iterator[FolderEntry]:
        """Yield files and folders at any depth, without the contents of other programs' folders."""
        return self._walk_below(folder, "", frozenset({os.path.realpath(folder)}))

    def exists(self, path: str) -> bool:
        """True if a file or folder has this path."""
        return Path(path).exists()

    def _walk_below(self, folder: str, prefix: str, real_folders_above: frozenset[str]) -> Iterator[FolderEntry]:
        for dir_entry in sorted(_list_folder(folder), key=lambda dir_entry: dir_entry.name):
            path, is_folder = prefix + dir_entry.name, dir_entry.is_dir()
            if not is_folder and not dir_entry.is_file():
                continue
            yield FolderEntry(path, is_folder)
            if is_folder and is_data_name(dir_entry.name, is_folder=True):
                real_folder = os.path.realpath(dir_entry.path)
                if real_folder not in real_folders_above:  # a link to a folder above it
                    yield from self._walk_below(dir_entry.path, f"{path}/", real_folders_above | {real_folder})


def _list_folder(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as dir_entries:
            return list(dir_entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}; may this user read it?", path=folder) from None


class RemoteStorage:
    """File system behind an fsspec URL; its paths have no protocol."""

    def __init__(self, file_system: Any) -> None:
        self.fs = file_system

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
        """Yield files and folders at any depth, from a single listing."""
        entry_by_path = self.fs.find(folder, withdirs=True, detail=True)
        listed_folder = folder.strip("/")
        for name, entry in entry_by_path.items():
            if path := name.strip("/").removeprefix(listed_folder).strip("/"):
                yield FolderEntry(path, entry["type"] == "directory")

    def exists(self, path: str) -> bool:
        """True if a file or folder has this path."""
        return bool(self.fs.exists(path))


@contextmanager
def _driver_errors(url: str) -> Iterator[None]:
    """Raise StoreError for a driver's error that readers do not know, so that the step may be retried."""
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


def unreadable_name_reason(file_name: str) -> str | None:
    """Return the reason why files of this name are not read; None if they are."""
    base_name = file_name.lower().removesuffix(".gz")
    return next((reason for ending, reason in _REASON_BY_ENDING.items() if base_name.endswith(ending)), None)


def unreadable_text_reason(first_bytes: bytes) -> str | None:
    """Return the reason why a file with these first bytes is not a UTF-8 text table; None if it may be one."""
    for magic, reason in _REASON_BY_FIRST_BYTES:
        if first_bytes.startswith(magic):
            return reason
    if first_bytes.startswith(_UTF_32_BYTE_ORDER_MARKS):
        return "is UTF-32: convert it to UTF-8, e.g. with iconv -f utf-32 -t utf-8"
    if first_bytes.startswith(_UTF_16_BYTE_ORDER_MARKS):
        return UTF_16_REASON
    text_start = first_bytes[:4096]
    while text_start.startswith(UTF_8_BYTE_ORDER_MARK):
        text_start = text_start.removeprefix(UTF_8_BYTE_ORDER_MARK)
    if b"\x00" in text_start.partition(b"\n")[0]:
        return "has zero bytes in its first line: if it is UTF-16, convert it, e.g. with iconv -f utf-16le -t utf-8"
    nonblank_start = text_start.lstrip(_BLANK_BYTES)
    if nonblank_start.lower().startswith(_MARKUP_PREFIXES):
        return "is a page of HTML or XML: is it what you meant to download?"
    if (nonblank_start[:1] == b"{" and nonblank_start[1:].lstrip(_BLANK_BYTES)[:1] in (b'"', b"}")) or (
        nonblank_start[:1] == b"[" and nonblank_start[1:].lstrip(_BLANK_BYTES)[:1] in (b"{", b"[", b'"')
    ):
        return f"looks like JSON: {JSON_REASON}"
    return None


def is_unreadable_data_name(file_name: str) -> bool:
    """True if an unreadable file holds data by its name; other JSON files, for example, may be settings."""
    base_name = file_name.lower().removesuffix(".gz")
    if base_name.endswith((".jsonl", ".ndjson", ".jl", ".orc", ".avro", ".feather", ".arrow")):
        return True
    name_stem = base_name.rpartition(".")[0]
    return _REASON_BY_ENDING.get(f".{base_name.rpartition('.')[2]}") == _UNPACK_REMEDY and name_stem.endswith(
        (".csv", ".tsv", ".parquet", ".txt", ".json", ".jsonl", ".ndjson")
    )


def find_row_separator(first_bytes: bytes) -> str | None:
    """Return the separator that occurs equally often in all first lines; None if there is none."""
    lines = [line for line in first_bytes.split(b"\n")[:20] if line.strip()]
    if len(lines) > 2 and not first_bytes.endswith(b"\n"):
        lines.pop()
    for separator in (b"::", b"\t", b",", b";", b"|", b"\x01"):
        separator_counts = {line.count(separator) for line in lines}
        if len(separator_counts) == 1 and separator_counts != {0} and (len(lines) > 1 or separator == b"\t"):
            return separator.decode()
    return None


def separator_in_words(field_separator: str) -> str:
    """Return a separator as messages name it."""
    return {"\t": "a tab", "\x01": "the sign \\u0001"}.get(field_separator, repr(field_separator))


def is_gzip(path: Path) -> bool:
    """True if a file begins with gzip's magic bytes."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
