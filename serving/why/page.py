"""Where a record of the night lies, and whether its page in Redis is the one that the night made."""

import asyncio
import hashlib
from typing import Any

import numpy as np
import xxhash

from cache.artefacts import ArtefactStore, generation_path
from cache.commands import PageRead
from cache.errors import CorruptArtefact, LarderError
from cache.keys import Keyspace
from cache.looking import Looking
from cache.manifest import Table, TablePart
from cache.outcomes import Missed, Want
from serving.snapshot import Snapshot

_SUMS_S = 2.0
"""How long the artefact store may take to hand over the checksums."""


class Pages:
    """Reads whole pages, so one at a time and only where somebody wants to know."""

    def __init__(self, looking: Looking, keyspace: Keyspace, store: ArtefactStore) -> None:
        self._looking = looking
        self._keyspace = keyspace
        self._store = store

    async def told(self, snapshot: Snapshot, table: Table, want: Want) -> dict[str, Any]:
        """Of a record that the night has: its page, its place there, and both checksums (xxh3-64, hex)."""
        place, position = snapshot.directories[table.entity].place(want.position)
        part = table.parts[place]
        number, offset = table.locate(place, position)
        within = number - part.first_page
        records = min(table.records_per_page, part.count - within * table.records_per_page)
        size_bytes = records * table.layout.size_bytes
        generation = snapshot.generation
        told: dict[str, Any] = {
            "key": self._keyspace.page(generation, table.name, number),
            "number": number,
            "shard": place,
            "offset_bytes": offset,
            "size_bytes": size_bytes,
            "records": records,
        }
        found = await self._looking.page(PageRead(generation, table.name, number, 0, size_bytes))
        expected, why = await self._expected(generation, part, within)
        if isinstance(found, Missed):
            return told | {"state": found.reason.value, "expected": expected, "checksum": None}
        checksum = f"{xxhash.xxh3_64_intdigest(found):016x}"
        state = "unchecked" if expected is None else "ok" if checksum == expected else "damaged"
        told |= {"state": state, "expected": expected, "checksum": checksum}
        return told | ({"why": why} if why else {})

    async def _expected(
        self, generation: str, part: TablePart, within: int
    ) -> tuple[str | None, str | None]:
        try:
            async with asyncio.timeout(_SUMS_S):
                return await asyncio.to_thread(self._read, generation, part, within), None
        except TimeoutError:
            return None, f"the artefact store did not hand over the checksums within {_SUMS_S:g} s"
        except LarderError as error:
            return None, error.message

    def _read(self, generation: str, part: TablePart, within: int) -> str | None:
        raw = self._store.read(generation_path(generation, part.sums.path))
        if raw is None or hashlib.sha256(raw).hexdigest() != part.sums.sha256:
            raise CorruptArtefact(f"{part.sums.path} is missing in the store, or damaged")
        return f"{int(np.frombuffer(raw, '<u8')[within]):016x}"
