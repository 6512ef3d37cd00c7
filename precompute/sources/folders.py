"""The files that a pattern names below a folder: one rule for `init`, `check`, pinning and the night, and for URLs.

A folder is read with its subfolders, also one that a wildcard matches. Notes of other programs are no data; tables
whose log says which of their files count are refused.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Protocol

from cache.errors import SourceError

_NOTE_BEGINNINGS: Final = (".", "~", "#")
"""Hidden files and folders, lock files of office programs (`~$a.csv`), recovery files of editors (`#a.csv#`)."""
_NOTE_ENDINGS: Final = (
    "~", ".bak", ".crc", ".crdownload", ".lck", ".lock", ".part", ".partial", ".swp", ".temp", ".tmp", "._COPYING_",
)  # fmt: skip
"""Endings of backups, locks, checksums, and of files that are still being written."""
_NOTE_FOLDERS: Final = frozenset({"lost+found"})
_WILDCARD: Final = re.compile(r"[*?\[]")
_RECURSIVE: Final = "**"
_ICEBERG_METADATA: Final = re.compile(
    r"(v\d+|\d{5}-[0-9a-f-]{36})(\.gz)?\.metadata\.json|version-hint\.text"
)
_MARKERS: Final = {
    "_delta_log": "a Delta table", ".hoodie": "a Hudi table", "_spark_metadata": "the output of a Spark stream",
}  # fmt: skip
"""Folders that only a table of this kind has."""


class Entry(NamedTuple):
    """File or folder by its path below the folder that was listed, with slashes."""

    path: str
    is_folder: bool


class Storage(Protocol):
    """What lists folders: this host's file system, or one behind a URL. Paths are the storage's own, with slashes."""

    def children(self, folder: str) -> Iterable[Entry]:
        """Files and folders right in a folder; none where there is no such folder."""
        ...

    def descendants(self, folder: str) -> Iterable[Entry]:
        """Files and folders at any depth of a folder; what lies in notes of other programs may be left out."""
        ...

    def exists(self, path: str) -> bool:
        """True if there is a file or a folder of this path."""
        ...


def is_data(name: str, *, is_folder: bool = False) -> bool:
    """True if a file, or a folder, of this name holds data: names of notes begin or end as such notes do.

    Folders such as `_day=1` are values of a partition.
    """
    if name.startswith("_"):
        return is_folder and "=" in name
    if name.startswith(_NOTE_BEGINNINGS):
        return False
    return name not in _NOTE_FOLDERS if is_folder else not name.endswith(_NOTE_ENDINGS)


@dataclass(frozen=True, slots=True)
class Selection:
    """Paths below `folder` that a pattern names, sorted; `notes` matched it, too, but are no data."""

    folder: str
    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()


def select(storage: Storage, folder: str, pattern: str) -> Selection:
    """The data files below a folder that a pattern of parts with slashes names; no wildcard: all of that folder's.

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


def demand_plain_folder(storage: Storage, folder: str, *, checked_folders: set[str]) -> None:
    """Raises SourceError if a folder, or one above it, is a table whose log says which of its files count.

    Folders that are `checked_folders` are not looked at again, and those looked at become so.
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


def refused_table(folder: str, kind: str) -> SourceError:
    """Error for a table whose log says which of its files count."""
    return SourceError(
        f"{folder} is {kind}: its log says which of its files count, and Larder does not read that log. Write its rows "
        "as Parquet files into a folder of their own (Spark: df.write.parquet(...)) and name that",
        path=folder,
    )


def tables_among(entries: Iterable[Entry]) -> dict[str, str]:
    """Folder -> kind of each table that entries show by its log."""
    return dict(filter(None, map(_marked_table, entries)))


def _without_fixed(storage: Storage, folder: str, parts: Sequence[str]) -> tuple[str, list[str]]:
    """(folder that a pattern's first parts name, parts behind them); a name with brackets may be that of a folder."""
    remaining_parts = list(parts)
    while remaining_parts:
        part = remaining_parts[0]
        joined = part if not folder else f"{folder.rstrip('/')}/{part}"
        if _WILDCARD.search(part) and ("*" in part or not storage.exists(joined)):
            break
        folder, remaining_parts = joined, remaining_parts[1:]
    return folder, remaining_parts or [_RECURSIVE]


def _is_named(path: Sequence[str], parts: Sequence[str]) -> bool:
    """True if a path, or a folder above it, is what a pattern's parts name."""
    if not parts or not path:
        return not parts
    if parts[0] == _RECURSIVE:
        return any(_is_named(path[skipped:], parts[1:]) for skipped in range(len(path)))
    return fnmatchcase(path[0], parts[0]) and _is_named(path[1:], parts[1:])


def _walk(storage: Storage, root: str, below: str, parts: Sequence[str]) -> Iterator[Entry]:
    """What may be named by the rest of a pattern, and beside it what tells a table by its log."""
    folder = f"{root.rstrip('/')}/{below}".rstrip("/") or root
    prefix = f"{below}/" if below else ""
    if not parts or parts[0] == _RECURSIVE:
        for entry in storage.descendants(folder):
            yield Entry(prefix + entry.path, entry.is_folder)
        return
    for entry in storage.children(folder):
        yield Entry(prefix + entry.path, entry.is_folder)
        if entry.is_folder and entry.path == "metadata":
            for metadata_entry in storage.children(f"{folder}/metadata"):
                yield Entry(f"{prefix}metadata/{metadata_entry.path}", metadata_entry.is_folder)
        if entry.is_folder and fnmatchcase(entry.path, parts[0]):
            yield from _walk(storage, root, prefix + entry.path, parts[1:])


def _marked_table(entry: Entry) -> tuple[str, str] | None:
    """(folder of the table, its kind) if an entry belongs to the log of one."""
    *above, name = entry.path.split("/")
    if entry.is_folder and name in _MARKERS:
        return "/".join(above), _MARKERS[name]
    if not entry.is_folder and above[-1:] == ["metadata"] and _ICEBERG_METADATA.fullmatch(name):
        return "/".join(above[:-1]), "an Iceberg table"
    return None


def _kind_of_table(storage: Storage, folder: str) -> str | None:
    for name, kind in _MARKERS.items():
        if storage.exists(f"{folder}/{name}"):
            return kind
    metadata = storage.children(f"{folder}/metadata")
    is_iceberg = any(_ICEBERG_METADATA.fullmatch(entry.path) for entry in metadata)
    return "an Iceberg table" if is_iceberg else None


def _is_within(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


class LocalStorage:
    """File system of this host; links are followed, but for one to a folder above it."""

    def children(self, folder: str) -> Iterator[Entry]:
        """Files and folders right in a folder."""
        yield from (Entry(dir_entry.name, dir_entry.is_dir()) for dir_entry in _scan(folder))

    def descendants(self, folder: str) -> Iterator[Entry]:
        """Files and folders at any depth; what lies in notes of other programs is left out."""
        return self._below(folder, "", frozenset({os.path.realpath(folder)}))

    def exists(self, path: str) -> bool:
        """True if there is a file or a folder of this path."""
        return Path(path).exists()

    def _below(self, folder: str, prefix: str, above: frozenset[str]) -> Iterator[Entry]:
        for dir_entry in sorted(_scan(folder), key=lambda dir_entry: dir_entry.name):
            path, is_folder = prefix + dir_entry.name, dir_entry.is_dir()
            if not is_folder and not dir_entry.is_file():
                continue
            yield Entry(path, is_folder)
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
