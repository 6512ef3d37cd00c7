"""All connections of a server: how many may be open, and an end for those that stand where they stand for too long."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from typing import Protocol

from cache.config.peers import Bounds
from serving.fast_http.unread_answers import UnreadAnswers

_AT_ONCE = 32
"""Connections that are looked at in one turn of the loop."""
_LOOK_S = 1.0

log = logging.getLogger(__name__)


class Peer(Protocol):
    """A connection that can be checked for progress, and dropped."""

    def close_if_stalled(self, now_s: float) -> None:
        """Ends the connection if it has not moved on in time."""

    def drop(self) -> None:
        """Ends the connection to make room for another, unless it has a request under way."""


class Connections:
    """Bounds the number of connections. One timer serves all: one for each request would cost as much as its answer."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.unread = UnreadAnswers(bounds.answers_bytes)
        self.ended_by_reason: Counter[str] = Counter()
        """Connections ended, by reason; without those that were ended by their peers or for idleness."""
        self._unasked: dict[Peer, None] = {}  # oldest first
        self._logged_count = 0

    def admit(self, connection: Peer, count: int) -> bool:
        """Returns whether one more may stay, itself counted. The oldest that has asked nothing may have to go."""
        bounds, unasked = self.bounds, self._unasked
        is_full = count > bounds.connections_max
        if is_full or len(unasked) >= bounds.connections_new_max:
            if not unasked:
                return False
            oldest = next(iter(unasked))
            del unasked[oldest]
            self.ended_by_reason["unasked"] += 1
            oldest.drop()
        unasked[connection] = None
        return True

    def discard_unasked(self, connection: Peer) -> None:
        """Takes a connection off those that have asked nothing: a head of it is here, or it is gone."""
        self._unasked.pop(connection, None)

    @property
    def every_s(self) -> float:
        """Seconds between two looks at a connection."""
        bounds = self.bounds
        shortest = min(bounds.head_timeout_s, bounds.body_timeout_s, bounds.write_timeout_s)
        return min(_LOOK_S, shortest / 4)

    async def close_stalled(self, connections: Collection[Peer], now_s: float) -> None:
        """Looks at each connection, a few in a turn of the loop."""
        for number, connection in enumerate(list(connections), 1):
            connection.close_if_stalled(now_s)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        self._log_ended()

    def _log_ended(self) -> None:
        """Logs ended connections in one line for all: who is ended for what it does must not fill the log with it."""
        if (ended_count := self.ended_by_reason.total()) > self._logged_count:
            reasons = ", ".join(
                f"{count} {reason}" for reason, count in self.ended_by_reason.most_common()
            )
            log.warning(
                "%d connections ended (since the start: %s)",
                ended_count - self._logged_count,
                reasons,
            )
            self._logged_count = ended_count
