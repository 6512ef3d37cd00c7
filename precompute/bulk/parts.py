"""Parts of a generation's pages: one shard of one table each, the unit of loading, verifying and resuming."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.manifest import Manifest, Table, TablePart
from cache.format.redis_keys import Keyspace


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a generation's pages, one shard of one table: the unit of loading, verifying and resuming."""

    table: Table
    number: int

    @property
    def pages(self) -> TablePart:
        """Entry of the part in the manifest."""
        return self.table.parts[self.number]

    @property
    def name(self) -> str:
        """Field of the part in the generation's `loaded` hash."""
        return f"{self.table.name}/{self.number}"

    @property
    def progress(self) -> str:
        """The field that says, while it is being loaded, how many of its pages are."""
        return f"{self.name}/pages"

    @property
    def read(self) -> str:
        """The field that says, while a generation is being verified, under which servers all of it was read back."""
        return f"{self.name}/read"

    @property
    def loaded_digest(self) -> bytes:
        """The value of its field once it is wholly loaded."""
        return self.pages.sums.sha256.encode()

    def size_of(self, page: int) -> int:
        """Bytes of its page of that number (from 0)."""
        part_bytes = self.pages.count * self.table.layout.size_bytes
        return min(self.table.page_bytes, part_bytes - page * self.table.page_bytes)

    def key(self, keys: Keyspace, generation: str, page: int) -> str:
        """Redis key of its page of that number (from 0)."""
        return keys.page(generation, self.table.name, self.pages.first_page + page)

    def read_sums(self, root: Path) -> NDArray[np.uint64]:
        """uint64[pages]: checksum of each page. Raises CorruptArtefact when the file does not fit the manifest."""
        sums = np.fromfile(root / self.pages.sums.path, "<u8")
        if len(sums) != self.pages.pages:
            raise CorruptArtefact(
                f"{self.pages.sums.path} holds {len(sums)} checksums for {self.pages.pages} pages"
            )
        return sums


def parts_of(manifest: Manifest) -> list[Part]:
    """All parts of all tables."""
    return [
        Part(table, number)
        for table in manifest.stored_tables.values()
        for number in range(len(table.parts))
    ]


def page_keys(keys: Keyspace, manifest: Manifest) -> Iterator[str]:
    """Every page key of a generation, from the manifest alone: no SCAN."""
    for table in manifest.stored_tables.values():
        for page in range(table.pages):
            yield keys.page(manifest.generation, table.name, page)


def total_bytes(manifest: Manifest) -> int:
    """Payload of all pages."""
    return sum(part.pages.file.size_bytes for part in parts_of(manifest))


def total_pages(manifest: Manifest) -> int:
    """Number of pages of all tables."""
    return sum(table.pages for table in manifest.stored_tables.values())
