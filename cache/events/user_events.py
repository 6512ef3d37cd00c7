"""Events of users that a process keeps in memory: by user, packed, newest last. Pure."""

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from cache.events.event import Event
from cache.events.position import Position

_TAIL: Final = struct.Struct("<qQH")
"""Behind an item's id: when it happened (microseconds), the position's number, and bytes of the id."""
AT_ONCE: Final = 256
"""Users, items or values between two yields of what is done in turns."""
_USER_BYTES: Final = 180
"""Memory of a user besides the id and the packed events, about."""


class UserEvent(NamedTuple):
    """Event of a user: item, when it happened (microseconds), and its position's number.

    The item is empty where the event set attributes of the user, whose values `AttributeEvents` has.
    """

    item: bytes
    at_us: int
    number: int


class UserEvents:
    """Events of users since some position; a probe for a user without any costs one look into a dictionary.

    Positions only grow: an event that is not behind the last one is taken once, whoever tells it again.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.last = 0
        """Number of the newest position that was taken in."""
        self.complete_after_number = 0
        """Number of the position behind which every event is here, up to the last."""
        self.packed: dict[bytes, bytes] = {}
        """Events by user, for probes: with each event a user gets another object, and only then."""

    def __len__(self) -> int:
        """Users that have any."""
        return len(self.packed)

    def __contains__(self, user: bytes) -> bool:
        return user in self.packed

    def add(self, position: Position, event: Event) -> bool:
        """Takes the next event in; False for one that was there, True also where it changes nobody's input."""
        number = position.number
        if number <= self.last:
            return False
        self.last = number
        user, item = event.user, event.item
        if event.kind == "user" and event.attributes:
            item = b""
        elif not event.counts:
            return True
        if user is None or item is None:
            return True
        previous_packed = self.packed.get(user)
        if previous_packed is None:
            previous_packed = b""
            self.size_bytes += _USER_BYTES + len(user)
        packed = item + _TAIL.pack(event.at_us, number, len(item))
        self.packed[user] = previous_packed + packed
        self.size_bytes += len(packed)
        return True

    def has_newer(self, user: bytes, number: int) -> bool:
        """True if the user has an event behind this position's number."""
        packed = self.packed.get(user)
        return (
            packed is not None and _TAIL.unpack_from(packed, len(packed) - _TAIL.size)[1] > number
        )

    def has_newer_item(self, user: bytes, number: int) -> bool:
        """True if one of the user's events behind this position's number is of an item."""
        return any(event.item for event in self._backwards(user, number))

    def list_events_after(self, user: bytes, number: int) -> list[UserEvent]:
        """Events of the user behind this position's number, in the order of their positions."""
        return list(self._backwards(user, number))[::-1]

    def drop_until(self, number: int, users: Iterable[bytes] | None = None) -> int:
        """Forgets events up to this position's number, of all or of some users; how many users have none left."""
        forgotten_count, self.complete_after_number = 0, max(self.complete_after_number, number)
        for user in list(self.packed) if users is None else users:
            if (previous_packed := self.packed.get(user)) is None:
                continue
            remaining_events = self.list_events_after(user, number)
            if not remaining_events:
                self.forget(user)
                forgotten_count += 1
                continue
            packed = b"".join(
                event.item + _TAIL.pack(event.at_us, event.number, len(event.item))
                for event in remaining_events
            )
            if len(packed) < len(previous_packed):
                self.packed[user] = packed
                self.size_bytes -= len(previous_packed) - len(packed)
        return forgotten_count

    def become(self, replacement: "UserEvents") -> None:
        """Holds from now on what another one holds, which is given up with that; probes go on where they were."""
        deque(self.become_in_turns(replacement), maxlen=0)

    def become_in_turns(self, replacement: "UserEvents") -> Iterator[None]:
        """As `become`, some users between two yields. Until the end some have their old events, others the new ones."""
        packed_by_user, coming = self.packed, replacement.packed
        for count, user in enumerate(
            [*packed_by_user, *(user for user in coming if user not in packed_by_user)], 1
        ):
            packed = coming.get(user)
            if packed is None:
                del packed_by_user[user]
            elif packed_by_user.get(user) != packed:  # who has the same keeps the very object
                packed_by_user[user] = packed
            if not count % AT_ONCE:
                yield
        self.size_bytes, self.last, self.complete_after_number = (
            replacement.size_bytes,
            replacement.last,
            replacement.complete_after_number,
        )

    def put_before(self, earlier_events: "UserEvents", users: Iterable[bytes]) -> None:
        """Puts what another one holds of these users before their events here, which are all newer."""
        for user in users:
            earlier, newer_packed = earlier_events.packed[user], self.packed.get(user)
            self.packed[user] = earlier if newer_packed is None else earlier + newer_packed
            self.size_bytes += len(earlier) + (
                _USER_BYTES + len(user) if newer_packed is None else 0
            )

    def forget(self, user: bytes) -> None:
        """Forgets a user's events, for one who was erased."""
        packed = self.packed.pop(user, None)
        if packed is not None:
            self.size_bytes -= _USER_BYTES + len(user) + len(packed)

    def _backwards(self, user: bytes, number: int) -> Iterator[UserEvent]:
        packed = self.packed.get(user, b"")
        end = len(packed)
        while end:
            at = end - _TAIL.size
            at_us, event_number, length = _TAIL.unpack_from(packed, at)
            if event_number <= number:
                return
            end = at - length
            yield UserEvent(packed[end:at], at_us, event_number)
