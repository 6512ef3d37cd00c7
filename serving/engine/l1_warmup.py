"""Reading ahead: what callers ask for is in L1 before a generation answers, at the start and at every flip."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cache.tiers.reads import Hit, RecordKey
from cache.tiers.tiered import TieredCache
from serving.engine.answer_observer import EntityName
from serving.engine.entity import find_record_key
from serving.generations.snapshot import Snapshot

_SLICE = 16
_PAUSE_S = 0.002
"""Seconds between slices: readers go first, also on the wire and in Redis."""
_LONGEST_S = 5.0
_RECORDS_AT_ONCE = 256


@dataclass(slots=True, eq=False)
class L1Warmup:
    """Warm-up of L1: reads each id of a generation once, so that topping up costs only the new ids.

    `recent` has this replica's requests, `hottest` returns those of all; it never raises, and is called once for each
    generation.
    """

    tiers: TieredCache
    recent: Callable[[], Sequence[EntityName]]
    hottest: Callable[[], Awaitable[Sequence[EntityName]]] | None = None
    observe: Callable[[int, float], None] = lambda _records, _seconds: None
    timer: Callable[[], float] = time.monotonic
    _generation: str | None = field(init=False, default=None)
    _warmed_names: set[EntityName] = field(init=False, default_factory=set)
    _shared: Sequence[EntityName] = field(init=False, default=())

    async def __call__(self, coming: Snapshot, current: Snapshot | None) -> None:
        """Read hot ids for the coming generation, this replica's own first; bounded in time."""
        if current is not None and coming.generation == current.generation:
            return
        started_at = self.timer()
        if coming.generation != self._generation:
            shared = () if self.hottest is None else await self.hottest()
            self._generation, self._warmed_names, self._shared = coming.generation, set(), shared
        hot_names = dict.fromkeys([*self.recent(), *self._shared])
        new = [hot_name for hot_name in hot_names if hot_name not in self._warmed_names]
        self._warmed_names = {hot_name for hot_name in hot_names if hot_name in self._warmed_names}
        records, give_up = 0, started_at + _LONGEST_S
        for start in range(0, len(new), _SLICE):
            if self.timer() >= give_up:
                break
            part = new[start : start + _SLICE]
            if record_keys := _build_record_keys(coming, part):
                read = await self.tiers.get_many(
                    coming.view, record_keys, give_up, is_counted=False
                )
                records += sum(isinstance(result, Hit) for result in read)
            self._warmed_names.update(part)
            await asyncio.sleep(_PAUSE_S)
        if new:
            self.observe(records, self.timer() - started_at)
        if len(new) >= _RECORDS_AT_ONCE:
            # It stays for the life of the generation; a full collection that walked it would hold every request.
            gc.collect(1)
            gc.freeze()


def _build_record_keys(coming: Snapshot, names: Sequence[EntityName]) -> list[RecordKey]:
    tables = coming.manifest.tables
    record_keys = [
        find_record_key(coming, tables[name], raw)
        for name, raw in names
        if name in tables and not coming.blocks(tables[name], raw)
    ]
    return [record_key for record_key in record_keys if record_key.position >= 0]
