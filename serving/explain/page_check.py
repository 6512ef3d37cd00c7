"""Place of a nightly record, and whether its page in Redis is the one that the night made."""

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from cache.errors import CorruptArtefact, LarderError
from cache.format.manifest import Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.l2.commands import PageRead
from cache.store.artefacts import ArtefactStore, generation_path
from cache.tiers.inspector import TierInspector
from cache.tiers.results import Miss, RecordKey
from serving.generations.snapshot import Snapshot
from serving.generations.store_threads import InThread

_SUMS_S = 2.0
"""Seconds that the artefact store may take to hand over the checksums."""


_AT_ONCE = 2
"""Reads of checksums, those included that nobody waits for any more."""


@dataclass(slots=True, eq=False)
class PageChecks:
    """Reads whole pages, so one at a time and only where somebody wants to know."""

    inspector: TierInspector
    keyspace: Keyspace
    store: ArtefactStore
    in_thread: InThread
    _reading: set[asyncio.Task[str]] = field(init=False, default_factory=set)

    async def check_page(
        self, snapshot: Snapshot, table: Table, record_key: RecordKey
    ) -> dict[str, Any]:
        """Page of a record of the night, the record's place there, and both checksums (xxh3-64, hex)."""
        shard, position = snapshot.directories[table.entity].locate(record_key.position)
        part = table.parts[shard]
        number, offset = table.locate(shard, position)
        within = number - part.first_page
        records = min(table.records_per_page, part.count - within * table.records_per_page)
        size_bytes = records * table.layout.size_bytes
        generation = snapshot.generation
        page_report: dict[str, Any] = {
            "key": self.keyspace.page(generation, table.name, number),
            "number": number,
            "shard": shard,
            "offset_bytes": offset,
            "size_bytes": size_bytes,
            "records": records,
        }
        page_result = await self.inspector.page(
            PageRead(generation, table.name, number, 0, size_bytes)
        )
        expected, sums_error = await self._expected(generation, part, within)
        if isinstance(page_result, Miss):
            return page_report | {
                "state": page_result.reason.value,
                "expected": expected,
                "checksum": None,
            }
        checksum = f"{xxhash.xxh3_64_intdigest(page_result):016x}"
        state = "unchecked" if expected is None else "ok" if checksum == expected else "damaged"
        page_report |= {"state": state, "expected": expected, "checksum": checksum}
        return page_report | ({"why": sums_error} if sums_error else {})

    async def _expected(
        self, generation: str, part: TablePart, within: int
    ) -> tuple[str | None, str | None]:
        late = f"the artefact store did not hand over the checksums within {_SUMS_S:g} s"
        if len(self._reading) >= _AT_ONCE:
            return None, late
        task = asyncio.create_task(self.in_thread(self._read, generation, part, within))
        self._reading.add(task)
        task.add_done_callback(self._discard_task)
        # Not ended with its caller: its thread would go on, and the next caller would take one more.
        if not (await asyncio.wait({task}, timeout=_SUMS_S))[0]:
            return None, late
        try:
            return task.result(), None
        except LarderError as error:
            return None, error.message

    def _discard_task(self, task: "asyncio.Task[str]") -> None:
        self._reading.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever still waits

    def _read(self, generation: str, part: TablePart, within: int) -> str:
        raw = self.store.read(generation_path(generation, part.sums.path))
        if raw is None or hashlib.sha256(raw).hexdigest() != part.sums.sha256:
            raise CorruptArtefact(f"{part.sums.path} is missing in the store, or damaged")
        return f"{int(np.frombuffer(raw, '<u8')[within]):016x}"
