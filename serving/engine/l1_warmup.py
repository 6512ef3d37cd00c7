"""Warm-up of L1: reads requested ids ahead, before a generation answers, at the start and at every flip."""

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

_SLICE_NAMES = 16
_SLICE_PAUSE_S = 0.002
"""Seconds between slices, so that requests' reads take precedence on the network and in Redis."""
_WARMUP_S_MAX = 5.0
_FREEZE_RECORDS_MIN = 256


@dataclass(slots=True, eq=False)
class L1Warmup:
    """Warm-up of L1; reads each id of a generation once, so that a later call reads only new ids.

    `get_recent_names` returns the ids requested from this replica, `get_shared_hot_names` those of all replicas; the
    latter never raises, and is called once per generation.
    """

    tiers: TieredCache
    get_recent_names: Callable[[], Sequence[EntityName]]
    get_shared_hot_names: Callable[[], Awaitable[Sequence[EntityName]]] | None = None
    observe_warmup: Callable[[int, float], None] = lambda _records, _seconds: None
    monotonic_clock: Callable[[], float] = time.monotonic
    _warmed_generation: str | None = field(init=False, default=None)
    _warmed_names: set[EntityName] = field(init=False, default_factory=set)
    _shared_hot_names: Sequence[EntityName] = field(init=False, default=())

    async def __call__(self, coming_snapshot: Snapshot, current_snapshot: Snapshot | None) -> None:
        """Read hot ids for the coming generation, those of this replica first, for a bounded time."""
        if current_snapshot is not None and coming_snapshot.generation == current_snapshot.generation:
            return
        started_at = self.monotonic_clock()
        if coming_snapshot.generation != self._warmed_generation:
            shared_hot_names = () if self.get_shared_hot_names is None else await self.get_shared_hot_names()
            self._warmed_generation, self._warmed_names, self._shared_hot_names = (
                coming_snapshot.generation,
                set(),
                shared_hot_names,
            )
        hot_names = dict.fromkeys([*self.get_recent_names(), *self._shared_hot_names])
        new_names = [hot_name for hot_name in hot_names if hot_name not in self._warmed_names]
        self._warmed_names = {hot_name for hot_name in hot_names if hot_name in self._warmed_names}
        record_count, give_up_at = 0, started_at + _WARMUP_S_MAX
        for slice_start in range(0, len(new_names), _SLICE_NAMES):
            if self.monotonic_clock() >= give_up_at:
                break
            name_slice = new_names[slice_start : slice_start + _SLICE_NAMES]
            if record_keys := _build_record_keys(coming_snapshot, name_slice):
                read_results = await self.tiers.get_many(
                    coming_snapshot.view, record_keys, give_up_at, is_counted=False
                )
                record_count += sum(isinstance(read_result, Hit) for read_result in read_results)
            self._warmed_names.update(name_slice)
            await asyncio.sleep(_SLICE_PAUSE_S)
        if new_names:
            self.observe_warmup(record_count, self.monotonic_clock() - started_at)
        if len(new_names) >= _FREEZE_RECORDS_MIN:
            # These records live as long as the generation; a full collection that visits them would delay all requests.
            gc.collect(1)
            gc.freeze()


def _build_record_keys(coming_snapshot: Snapshot, entity_names: Sequence[EntityName]) -> list[RecordKey]:
    table_by_name = coming_snapshot.manifest.tables
    record_keys = [
        find_record_key(coming_snapshot, table_by_name[table_name], entity_id)
        for table_name, entity_id in entity_names
        if table_name in table_by_name and not coming_snapshot.blocks_entity(table_by_name[table_name], entity_id)
    ]
    return [record_key for record_key in record_keys if record_key.directory_position >= 0]
