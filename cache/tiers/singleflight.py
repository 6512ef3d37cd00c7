"""Request coalescing: one computation per key at a time, shared by all callers.

Cancelling a caller affects no other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from cache.native import loader

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


_LATE_MARKER: Sequence[Any] = []
"""Result of a waiter that timed out, compared by identity."""


class FlightAbandoned(RuntimeError):
    """The work was cancelled from outside while callers, which were not cancelled, were waiting."""


@dataclass(slots=True, eq=False)
class _Flight(Generic[K, V]):
    keys: Collection[K]
    """Keys in the order of the work's values."""
    is_single: bool = False
    """True if the work returns one value instead of a sequence."""
    work: asyncio.Future[Any] = field(init=False)
    is_under_way: bool = True
    waiters: dict[asyncio.Future[Sequence[V]], None] = field(default_factory=dict)
    _index_by_key: dict[K, int] | None = None

    def index_of(self, key: K) -> int:
        """Return the index of a key's value; builds the mapping at first use, which is rare."""
        if self._index_by_key is None:
            self._index_by_key = dict(zip(self.keys, range(len(self.keys)), strict=True))
        return self._index_by_key[key]


class FlightSeat(NamedTuple, Generic[K, V]):
    """A caller's membership in a flight, ended by `leave`."""

    flight: _Flight[K, V]
    value_index: int
    waiter: asyncio.Future[Sequence[V]]
    """Future that is done when the flight has ended."""

    def value(self) -> V:
        """Return the value for this key once the waiter is done; raise the work's error."""
        return self.waiter.result()[self.value_index]


class SingleFlight(Generic[K, V]):
    """Shared computations: callers with the same key wait for the same work.

    The work belongs to no caller: a cancelled caller only leaves, and the work is cancelled when the last caller has
    left. Every outcome (value, error, cancellation) reaches every waiter. After groupcache's singleflight.
    """

    def __init__(self) -> None:
        self.started_count = 0
        self.shared_count = 0
        self._flights: dict[K, _Flight[K, V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def do(self, key: K, work: Callable[[], Awaitable[V]], within_s: float | None = None) -> V:
        """Return the value of `key`: from the pending flight, else from `work()`, whose errors all waiters get.

        Raises TimeoutError after `within_s`; other waiters are not affected.
        """
        seat = self.board(key, work)
        # Costs less than half of `asyncio.timeout`.
        loop = asyncio.get_running_loop()
        timeout_handle = None if within_s is None else loop.call_later(within_s, _end_late, seat.waiter)
        try:
            if (values := await seat.waiter) is not _LATE_MARKER:
                return values[seat.value_index]
        finally:
            if timeout_handle is not None:
                timeout_handle.cancel()
            self.leave(seat)
        raise TimeoutError

    def board(self, key: K, work: Callable[[], Awaitable[V]]) -> FlightSeat[K, V]:
        """Join or start the flight of a key, for a caller that waits for many keys without a coroutine for each."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._start_flight(key, work())
        else:
            self.shared_count += 1
        return FlightSeat(flight, flight.index_of(key), self._join(flight))

    def leave(self, seat: FlightSeat[K, V]) -> None:
        """End a membership returned by `board`, whether the flight has ended or not."""
        self._leave(seat.flight, seat.waiter)

    async def do_many(self, keys: Sequence[K], work: Callable[[Sequence[K]], Awaitable[Sequence[V]]]) -> list[V]:
        """Return values in the order of `keys`; calls `work` once, with all keys that have no flight yet."""
        new_indexes, new_values, joined_values = await self.do_batch(
            keys, lambda indexes: work([keys[index] for index in indexes])
        )
        if not joined_values:
            return list(new_values)
        value_by_index = joined_values | dict(zip(new_indexes, new_values, strict=True))
        return [value_by_index[index] for index in range(len(keys))]

    async def do_batch(
        self, keys: Sequence[K], work: Callable[[Sequence[int]], Awaitable[Sequence[V]]]
    ) -> tuple[Sequence[int], Sequence[V], dict[int, V]]:
        """Return the values of a batch; `work` gets the indexes of the keys without a flight.

        Returns those indexes, the unchanged result of `work`, and the values at all other indexes.
        """
        key_list = list(keys)
        flight: _Flight[K, V] = _Flight(key_list)
        joined_indexes = board_absent_keys(self._flights, key_list, flight)
        if not joined_indexes:
            self._begin(flight, work, range(len(keys)))
            return range(len(keys)), await self._wait(flight), {}
        flight_by_index = {index: self._flights[keys[index]] for index in joined_indexes}
        new_indexes = [index for index in range(len(keys)) if index not in flight_by_index]
        flight.keys = [keys[index] for index in new_indexes]
        own_flight = self._begin(flight, work, new_indexes) if new_indexes else None
        self.shared_count += len(joined_indexes)
        values_by_flight = await self._wait_all(
            [*flight_by_index.values(), *([] if own_flight is None else [own_flight])]
        )
        joined_values = {
            index: values_by_flight[id(flight)][flight.index_of(keys[index])]
            for index, flight in flight_by_index.items()
        }
        return (new_indexes, () if own_flight is None else values_by_flight[id(own_flight)], joined_values)

    async def _wait_all(self, flights: Sequence[_Flight[K, V]]) -> dict[int, Sequence[V]]:
        flight_by_id = {id(flight): flight for flight in flights}
        waiter_by_flight = {flight_id: self._join(flight) for flight_id, flight in flight_by_id.items()}
        try:
            return {flight_id: await waiter for flight_id, waiter in waiter_by_flight.items()}
        finally:
            for flight_id, waiter in waiter_by_flight.items():
                self._leave(flight_by_id[flight_id], waiter)

    async def _wait(self, flight: _Flight[K, V]) -> Sequence[V]:
        # There is no await between looking up the flight and joining it, so it cannot end or be cancelled in between.
        waiter = self._join(flight)
        try:
            return await waiter
        finally:
            self._leave(flight, waiter)

    def _start_flight(self, key: K, work: Awaitable[V]) -> _Flight[K, V]:
        # A future is used directly; a coroutine becomes a separate task, independent of the caller.
        flight: _Flight[K, V] = _Flight((key,), is_single=True)
        flight.work = asyncio.ensure_future(work)
        self.started_count += 1
        self._flights[key] = flight
        flight.work.add_done_callback(lambda _: self._land(flight))
        return flight

    def _begin(
        self, flight: _Flight[K, V], work: Callable[[Sequence[int]], Awaitable[Sequence[V]]], indexes: Sequence[int]
    ) -> _Flight[K, V]:
        """Start the work of a registered flight; unregister the flight if that raises."""
        try:
            flight.work = asyncio.ensure_future(work(indexes))
        except BaseException:
            self._forget(flight)
            raise
        self.started_count += len(indexes)
        flight.work.add_done_callback(lambda _: self._land(flight))
        return flight

    def _join(self, flight: _Flight[K, V]) -> asyncio.Future[Sequence[V]]:
        waiter: asyncio.Future[Sequence[V]] = asyncio.get_running_loop().create_future()
        flight.waiters[waiter] = None
        return waiter

    def _leave(self, flight: _Flight[K, V], waiter: asyncio.Future[Sequence[V]]) -> None:
        flight.waiters.pop(waiter, None)
        if waiter.done() and not waiter.cancelled():
            waiter.exception()  # mark as retrieved: a waiter of several flights raises only the first error
        if not flight.waiters and not flight.work.done():
            # Unregister at once, so that no new caller joins a flight that is being cancelled.
            self._forget(flight)
            flight.work.cancel()

    def _land(self, flight: _Flight[K, V]) -> None:
        self._forget(flight)
        error: BaseException | None
        if flight.work.cancelled():
            error = FlightAbandoned(f"the work for {next(iter(flight.keys))!r} was cancelled")
        else:
            error = flight.work.exception()
        values: Sequence[V] = ()
        if error is None:
            values = (flight.work.result(),) if flight.is_single else flight.work.result()
        for waiter in flight.waiters:
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(values)

    def _forget(self, flight: _Flight[K, V]) -> None:
        # Keys of a registered flight cannot be registered by another: all of them are this flight's.
        if flight.is_under_way:
            flight.is_under_way = False
            leave_keys(self._flights, flight.keys)


def _end_late(waiter: asyncio.Future[Any]) -> None:
    # A value instead of an exception, which would form a reference cycle with the waiting frames.
    if not waiter.done():
        waiter.set_result(_LATE_MARKER)


def board_absent_keys(work_by_key: dict[K, V], keys: list[K], work: V) -> list[int]:
    """Insert `work` under each key that is absent; return the indexes of the other keys.

    The compiled versions of this and `leave_keys` take 3 us instead of 7 us for 100 keys; the whole batch takes 300 us.
    """
    return loader.kernels.board(work_by_key, keys, work)


def leave_keys(work_by_key: dict[K, V], keys: Collection[K]) -> None:
    """Remove each key that is present."""
    loader.kernels.leave(work_by_key, keys if type(keys) is list else list(keys))
