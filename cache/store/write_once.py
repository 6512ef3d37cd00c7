"""Write-once files of the store: versions of one value, and packs that let a long history be read in few requests."""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import orjson

from cache.errors import Conflict, CorruptArtefact, LarderError, UnknownFormat
from cache.store.artefacts import ArtefactStore

WRITE_TRIES_MAX = 16
"""Number of attempts at a change while other writers succeed first."""

MISSING_NUMBERS_MAX = 1_000
"""Number of missing files up to which they are looked for, or listed."""

PACKED_FILES_MIN = 100
"""Number of files outside any pack from which on a reader of all files writes a pack."""

# Other files in the folder (notes, an editor's copy) are not versions.
_VERSION_NAME_PATTERN = re.compile(r"([0-9]{12})\.json")

_PACK_NAME_PATTERN = re.compile(r"pack-[0-9a-f]{16}\.json")


@dataclass(frozen=True, slots=True)
class Versioned:
    """Value with numbered versions; number 0 before the first is written."""

    version: int = 0

    def to_bytes(self) -> bytes:
        """Return the value as the JSON that is stored."""
        raise NotImplementedError


Value = TypeVar("Value", bound=Versioned)


@dataclass(frozen=True, slots=True)
class Versions(Generic[Value]):
    """Versions of one value, `<folder>/<number>.json`; the newest is in force for every replica.

    `first_value` is in force before the first version; `parse` converts from the bytes of `to_bytes`.
    """

    folder: str
    first_value: Value
    parse: Callable[[bytes], Value]

    def list_numbers(self, store: ArtefactStore) -> set[int]:
        """Return the numbers of all versions in the store; takes a single listing."""
        file_names = store.names(self.folder)
        return {int(file_match[1]) for name in file_names if (file_match := _VERSION_NAME_PATTERN.fullmatch(name))}

    def read_newest_number(self, store: ArtefactStore) -> int:
        """Return the number of the version in force, 0 before the first; takes a single listing."""
        return max(self.list_numbers(store), default=0)

    def latest(self, store: ArtefactStore) -> Value:
        """Return the version in force; raise CorruptArtefact, which names its file, if it cannot be parsed."""
        version = self.read_newest_number(store)
        version_bytes = store.read(self.path(version)) if version else None
        if version_bytes is None:
            return self.first_value
        try:
            return self.parse(version_bytes)
        except UnknownFormat:
            raise
        except CorruptArtefact as error:
            raise CorruptArtefact(
                f"{self.path(version)} in {store.url} is {error.message}: put the file back from a copy of the store; "
                "without one, remove it, and repeat the changes that `larder audit` lists last"
            ) from error

    def change(self, store: ArtefactStore, change: Callable[[Value], Value]) -> Value:
        """Apply `change` to the newest version and write the result as the next version.

        Retries if another writer was first. An unchanged value is not written. Raises Conflict after WRITE_TRIES_MAX
        attempts.
        """
        for _ in range(WRITE_TRIES_MAX):
            latest_value = self.latest(store)
            new_value = replace(change(latest_value), version=latest_value.version)
            if new_value == latest_value:
                return latest_value
            new_value = replace(new_value, version=latest_value.version + 1)
            if store.write_once(self.path(new_value.version), new_value.to_bytes()):
                return new_value
        raise Conflict(f"{self.folder} changed {WRITE_TRIES_MAX} times while a version was being written; try again")

    def path(self, version: int) -> str:
        """Return the path of a version in the store."""
        return f"{self.folder}/{version:012d}.json"


def missing_numbers(numbers: Collection[int]) -> list[int]:
    """Return the smallest numbers from 1 to the largest of these that are not among them, MISSING_NUMBERS_MAX at most.

    Bounded, since a stray file may have any number in its name.
    """
    known_numbers = set(numbers)
    absent_numbers = (number for number in range(1, max(known_numbers, default=0)) if number not in known_numbers)
    return list(itertools.islice(absent_numbers, MISSING_NUMBERS_MAX))


def read_files(
    store: ArtefactStore, folder: str, listed_names: Collection[str], requested_names: Collection[str]
) -> tuple[dict[str, bytes], set[str]]:
    """Read write-once files; return (contents of existing `requested_names` by name, names of those in no pack).

    `listed_names` has all names in the folder. Takes at most two rounds of requests, however many files there are.
    """
    content_by_name: dict[str, bytes] = {}
    if requested_names:
        pack_paths = [f"{folder}/{name}" for name in sorted(listed_names) if _PACK_NAME_PATTERN.fullmatch(name)]
        for pack_bytes in store.read_many(pack_paths).values():
            with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
                text_by_name: dict[str, str] = orjson.loads(pack_bytes)
                content_by_name |= {
                    name: text_by_name[name].encode() for name in text_by_name.keys() & set(requested_names)
                }
    unpacked_names = [name for name in requested_names if name not in content_by_name]
    content_by_path = store.read_many([f"{folder}/{name}" for name in unpacked_names])
    content_by_name |= {
        name: content_by_path[f"{folder}/{name}"] for name in unpacked_names if f"{folder}/{name}" in content_by_path
    }
    return content_by_name, {name for name in unpacked_names if name in content_by_name}


def pack_files(store: ArtefactStore, folder: str, content_by_name: Mapping[str, bytes]) -> None:
    """Write these files as one pack if they are many and all were read; ignore a failure.

    The files themselves are kept and remain authoritative: a pack that lacks files or cannot be read only costs
    requests.
    """
    if len(content_by_name) < PACKED_FILES_MIN:
        return
    pack_bytes = orjson.dumps({name: content.decode() for name, content in sorted(content_by_name.items())})
    with contextlib.suppress(LarderError):
        store.write_once(f"{folder}/pack-{hashlib.sha256(pack_bytes).hexdigest()[:16]}.json", pack_bytes)
