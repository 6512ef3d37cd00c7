"""Newest position of an event that a replica knows of: those of new ones are greater, or nobody would see them."""

import asyncio
import logging
from typing import Final

from cache.errors import LarderError
from cache.events.position import BEGINNING, Position
from cache.events.taken import read_taken
from cache.store.artefacts import ArtefactStore
from serving.fresh.newer_events import NewerEvents
from serving.generations.holder import GenerationHolder
from serving.generations.store_threads import InThread

log = logging.getLogger(__name__)

_LOOK_S: Final = 2.0
"""Seconds that a start waits for the store: answers need none of this."""


class NewestPosition:
    """Newest position of the stream as it was followed, of the generations held, and of what nights took over.

    A Redis that comes back without its stream, and with a clock that is behind, would begin below it.
    """

    def __init__(
        self, newer_events: NewerEvents, holder: GenerationHolder, store: ArtefactStore
    ) -> None:
        self._newer_events, self._holder, self._store = newer_events, holder, store
        self._taken_position = BEGINNING

    async def load_taken_position(self, in_thread: InThread) -> None:
        """Looks what nights took over; once, at the start: whatever comes later is followed."""
        try:
            async with asyncio.timeout(_LOOK_S):
                self._taken_position = await in_thread(read_taken, self._store)
        except (LarderError, TimeoutError) as error:
            log.warning("what nights took of the stream of events is not known: %s", error)

    def __call__(self) -> Position:
        snapshots = () if self._holder.served is None else self._holder.served.snapshots
        numbers = [
            snapshot.events.until_number for snapshot in snapshots if snapshot.events is not None
        ]
        return max(
            self._taken_position, Position.of_number(max([self._newer_events.users.last, *numbers]))
        )
