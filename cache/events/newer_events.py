"""In-memory store of newer events: events of users, packed, and the newest attribute values that events set."""

import heapq
import struct
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from cache.errors import InvalidInput
from cache.events.event import Event
from cache.format.ids import FeatureValue
from cache.format.stream_position import Position
from cache.model.input_preparation import check_features
from cache.model.tower_spec import InputSpec

ENTITIES_AT_ONCE: Final = 256
"""Users, items or values handled between two yields of a job that shares the event loop."""

VALUES_MAX: Final = 64
"""Attributes kept per user or item, those set last: many attributes must not make every next event slow to add."""

_RECENT_ITEMS_MAX: Final = 4_096
"""Items that are checked one by one."""

_USER_BYTES: Final = 180
"""Memory of a user besides the id and the packed events, about."""

_ENTITY_BYTES: Final = 180
"""Memory of an entity besides id and packed values, about."""

_USER_EVENT_TAIL: Final = struct.Struct("<qQH")
"""Behind an item's id: when it happened (microseconds), the position's number, and bytes of the id."""

_VALUES_HEADER: Final = struct.Struct("<Q")
"""Number of the newest position before an entity's values, which are JSON: `{attribute: [number, value]}`."""


class UserEvent(NamedTuple):
    """Event of a user: item, time (microseconds), and position number.

    The item is empty if the event set attributes of the user, whose values `AttributeEvents` has.
    """

    item: bytes
    at_us: int
    number: int


class UserEvents:
    """Events of users since some position; a lookup for a user without events costs one dictionary access.

    Positions only grow: an event at or before the last position was added before and is ignored.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.last = 0
        """Number of the newest position that was added."""
        self.complete_after_number = 0
        """Number of the position after which all events up to `last` are here."""
        self.packed: dict[bytes, bytes] = {}
        """Packed events by user; a user's bytes object changes with each event of the user, and only then."""

    def __len__(self) -> int:
        """Return the number of users with events."""
        return len(self.packed)

    def __contains__(self, user: bytes) -> bool:
        return user in self.packed

    def add(self, position: Position, event: Event) -> bool:
        """Add the next event; False if its position was added before, True even if it changes no user's input."""
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
        packed = item + _USER_EVENT_TAIL.pack(event.at_us, number, len(item))
        self.packed[user] = previous_packed + packed
        self.size_bytes += len(packed)
        return True

    def has_newer(self, user: bytes, number: int) -> bool:
        """True if the user has an event after this position number."""
        packed = self.packed.get(user)
        return (
            packed is not None
            and _USER_EVENT_TAIL.unpack_from(packed, len(packed) - _USER_EVENT_TAIL.size)[1]
            > number
        )

    def has_newer_item(self, user: bytes, number: int) -> bool:
        """True if one of the user's events after this position number has an item."""
        return any(event.item for event in self._backwards(user, number))

    def list_events_after(self, user: bytes, number: int) -> list[UserEvent]:
        """Return the user's events after this position number, in order."""
        return list(self._backwards(user, number))[::-1]

    def drop_until(self, number: int, users: Iterable[bytes] | None = None) -> int:
        """Forget events up to this position number, of all or of some users; return how many users have none left."""
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
                event.item + _USER_EVENT_TAIL.pack(event.at_us, event.number, len(event.item))
                for event in remaining_events
            )
            if len(packed) < len(previous_packed):
                self.packed[user] = packed
                self.size_bytes -= len(previous_packed) - len(packed)
        return forgotten_count

    def become(self, replacement: "UserEvents") -> None:
        """Take over the contents of `replacement`, which must not be used afterwards; lookups go on meanwhile."""
        deque(self.become_in_turns(replacement), maxlen=0)

    def become_in_turns(self, replacement: "UserEvents") -> Iterator[None]:
        """Take over the contents of `replacement`, yielding every ENTITIES_AT_ONCE users.

        Until the generator ends, some users have their old events and others the new ones.
        """
        packed_by_user, coming = self.packed, replacement.packed
        for count, user in enumerate(
            [*packed_by_user, *(user for user in coming if user not in packed_by_user)], 1
        ):
            packed = coming.get(user)
            if packed is None:
                del packed_by_user[user]
            elif packed_by_user.get(user) != packed:  # who has the same keeps the very object
                packed_by_user[user] = packed
            if not count % ENTITIES_AT_ONCE:
                yield
        self.size_bytes, self.last, self.complete_after_number = (
            replacement.size_bytes,
            replacement.last,
            replacement.complete_after_number,
        )

    def put_before(self, earlier_events: "UserEvents", users: Iterable[bytes]) -> None:
        """Prepend the earlier events of these users; all of them are older than the events here."""
        for user in users:
            earlier, newer_packed = earlier_events.packed[user], self.packed.get(user)
            self.packed[user] = earlier if newer_packed is None else earlier + newer_packed
            self.size_bytes += len(earlier) + (
                _USER_BYTES + len(user) if newer_packed is None else 0
            )

    def forget(self, user: bytes) -> None:
        """Forget the events of an erased user."""
        packed = self.packed.pop(user, None)
        if packed is not None:
            self.size_bytes -= _USER_BYTES + len(user) + len(packed)

    def _backwards(self, user: bytes, number: int) -> Iterator[UserEvent]:
        packed = self.packed.get(user, b"")
        end = len(packed)
        while end:
            at = end - _USER_EVENT_TAIL.size
            at_us, event_number, length = _USER_EVENT_TAIL.unpack_from(packed, at)
            if event_number <= number:
                return
            end = at - length
            yield UserEvent(packed[end:at], at_us, event_number)


class AttributeValue(NamedTuple):
    """Attribute value that an event set, with its item or user; None clears the attribute."""

    raw: bytes
    attribute: str
    value: Any


class NewerValues(NamedTuple):
    """Values set between two positions, by number, still packed: usable in any thread."""

    after: int
    until_number: int
    packed: tuple[tuple[bytes, bytes], ...] = ()

    def values(self) -> Iterator[AttributeValue]:
        """Yield the values; entities come in the order of their newest positions."""
        for raw, packed in self.packed:
            if _newest_number(packed) <= self.after:
                continue
            for attribute, value in _values_after(packed, self.after).items():
                yield AttributeValue(raw, attribute, value)


class ValuesOfItems(NamedTuple):
    """Values of items set after a position, by number, still packed: usable in any thread."""

    after: int
    packed: Mapping[bytes, bytes]

    def of(self, raw: bytes) -> dict[str, Any]:
        """Return an item's values by attribute; empty for an item without any."""
        packed = self.packed.get(raw)
        return {} if packed is None else _values_after(packed, self.after)


class AttributeEvents:
    """Newest attribute values of items and users; a lookup for one without values costs one dictionary access.

    Positions only grow. Beyond VALUES_MAX the oldest values of an entity are dropped; callers bound the total memory.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.last = 0
        """Number of the newest position that was added."""
        self.complete_after_number = 0
        """Number of the position after which all values up to `last` are here, but for those dropped."""
        self.newest_item = 0
        """Number of the newest position that set a value of an item."""
        self.refusals = 0
        """Number of events for which older values of their entity were dropped."""
        # Each in the order of the newest positions, newest last.
        self._items: dict[bytes, bytes] = {}
        self._users: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        """Return the number of items and users with values."""
        return len(self._items) + len(self._users)

    def add(self, position: Position, event: Event) -> bool:
        """Add the next event; False if its position was added before, True even if it sets no value."""
        number = position.number
        if number <= self.last:
            return False
        self.last = number
        kind, raw = event.kind, event.source
        if kind == "interaction" or not (values := event.values):
            return True
        of_kind = self._items if kind == "item" else self._users
        previous_packed = of_kind.get(raw)
        numbered_values = {} if previous_packed is None else _unpack_values(previous_packed)
        numbered_values |= {name: [number, value] for name, value in values.items()}
        packed = _pack_values(number, numbered_values)
        more = (
            len(packed) - len(previous_packed)
            if previous_packed
            else len(packed) + len(raw) + _ENTITY_BYTES
        )
        self.refusals += len(numbered_values) > VALUES_MAX
        of_kind.pop(raw, None)
        of_kind[raw] = packed
        self.size_bytes += more
        if kind == "item":
            self.newest_item = number
        return True

    def items_since(self, number: int) -> NewerValues:
        """Return the values of items set after this position; the cost is small, however many there are."""
        until_number = max(number, self.newest_item)
        newer_values: list[tuple[bytes, bytes]] = []
        for raw, packed in islice(reversed(self._items.items()), _RECENT_ITEMS_MAX):
            if _newest_number(packed) <= number:
                return NewerValues(number, until_number, tuple(reversed(newer_values)))
            newer_values.append((raw, packed))
        # All of them, in one piece of C code: which are newer is told where they are unpacked.
        return NewerValues(number, until_number, tuple(self._items.items()))

    def of_user(self, user: bytes, number: int) -> dict[str, Any]:
        """Return the user's values set after this position, by attribute."""
        packed = self._users.get(user)
        return {} if packed is None else _values_after(packed, number)

    def of_items(self, items: Iterable[bytes], number: int) -> "ValuesOfItems":
        """Return the values of some items set after this position."""
        packed_by_item = self._items
        return ValuesOfItems(
            number, {raw: packed_by_item[raw] for raw in items if raw in packed_by_item}
        )

    def items_among(self, items: frozenset[bytes]) -> set[bytes]:
        """Return the ids among `items` for which events set values."""
        return self._items.keys() & items

    def newest_of_user(self, user: bytes) -> int:
        """Return the number of the newest position that set a value of the user; 0 for none."""
        packed = self._users.get(user)
        return 0 if packed is None else _newest_number(packed)

    def values_set_after(self, kind: str, number: int) -> dict[bytes, dict[str, Any]]:
        """Return the values set after this position, of the entities of one kind, `item` or `user`."""
        of_kind = self._items if kind == "item" else self._users
        return {
            raw: _values_after(packed, number)
            for raw, packed in of_kind.items()
            if _newest_number(packed) > number
        }

    def drop_until(self, number: int, entities_max: int = sys.maxsize) -> int:
        """Forget at most `entities_max` entities without a value after this position; return their number."""
        forgotten_count, self.complete_after_number = 0, max(self.complete_after_number, number)
        for of_kind in (self._items, self._users):
            forgotten_raws: list[bytes] = []
            for raw, packed in of_kind.items():
                if (
                    _newest_number(packed) > number
                    or forgotten_count + len(forgotten_raws) >= entities_max
                ):
                    break
                forgotten_raws.append(raw)
            for raw in forgotten_raws:
                self._forget(of_kind, raw)
            forgotten_count += len(forgotten_raws)
        return forgotten_count

    def become(self, replacement: "AttributeEvents") -> None:
        """Take over the contents of `replacement`, which must not be used afterwards."""
        self._items, self._users = replacement._items, replacement._users
        self.size_bytes, self.last = replacement.size_bytes, replacement.last
        self.newest_item, self.complete_after_number = (
            replacement.newest_item,
            replacement.complete_after_number,
        )
        self.refusals = max(self.refusals, replacement.refusals)

    def put_before(self, earlier_events: "AttributeEvents") -> None:
        """Add the values of `earlier_events`, which has earlier positions; values set here win."""
        deque(self.put_before_in_turns(earlier_events), maxlen=0)

    def put_before_in_turns(self, earlier_events: "AttributeEvents") -> Iterator[None]:
        """Add the values of `earlier_events`, yielding between batches of entities; add no event before the end."""
        items = yield from self._put_before(self._items, earlier_events._items)
        users = yield from self._put_before(self._users, earlier_events._users)
        self._items, self._users = items, users
        self.newest_item = max(self.newest_item, earlier_events.newest_item)
        self.refusals += earlier_events.refusals

    def _put_before(
        self, packed_by_id: dict[bytes, bytes], earlier: dict[bytes, bytes]
    ) -> Generator[None, None, dict[bytes, bytes]]:
        """Merge two mappings, each already in the order of its newest positions, into one in that order."""
        if not earlier:
            return packed_by_id
        only_earlier = ((raw, packed) for raw, packed in earlier.items() if raw not in packed_by_id)
        ordered_entities = heapq.merge(
            packed_by_id.items(), only_earlier, key=lambda entity: _newest_number(entity[1])
        )
        merged: dict[bytes, bytes] = {}
        grown = 0
        for count, (raw, packed) in enumerate(ordered_entities, 1):
            if raw not in packed_by_id:
                merged[raw] = packed
                grown += len(packed) + len(raw) + _ENTITY_BYTES
            elif raw in earlier:
                merged[raw] = _merge_values(earlier[raw], packed)
                grown += len(merged[raw]) - len(packed)
            else:
                merged[raw] = packed
            if not count % ENTITIES_AT_ONCE:
                yield
        self.size_bytes += grown
        return merged

    def forget(self, kind: str, raw: bytes) -> None:
        """Forget the values of an erased item or user."""
        self._forget(self._items if kind == "item" else self._users, raw)

    def _forget(self, of_kind: dict[bytes, bytes], raw: bytes) -> None:
        packed = of_kind.pop(raw, None)
        if packed is not None:
            self.size_bytes -= len(packed) + len(raw) + _ENTITY_BYTES


def _newest_number(packed: bytes) -> int:
    return int(_VALUES_HEADER.unpack_from(packed)[0])


def _unpack_values(packed: bytes) -> dict[str, list[Any]]:
    numbered_values: dict[str, list[Any]] = orjson.loads(packed[_VALUES_HEADER.size :])
    return numbered_values


def _pack_values(number: int, numbered_values: dict[str, list[Any]]) -> bytes:
    """Pack the values of one entity, whose newest position has this number; keep the newest VALUES_MAX.

    The choice depends on the stream alone, not on how far back a process has read it: replicas agree.
    """
    if len(numbered_values) > VALUES_MAX:
        newest_values = heapq.nlargest(
            VALUES_MAX,
            numbered_values.items(),
            key=lambda named_value: (named_value[1][0], named_value[0]),
        )
        numbered_values = dict(newest_values)
    return _VALUES_HEADER.pack(number) + orjson.dumps(numbered_values, option=orjson.OPT_SORT_KEYS)


def _merge_values(earlier: bytes, newer_packed: bytes) -> bytes:
    return _pack_values(
        _newest_number(newer_packed), _unpack_values(earlier) | _unpack_values(newer_packed)
    )


def _values_after(packed: bytes, number: int) -> dict[str, Any]:
    return {name: value for name, (at, value) in _unpack_values(packed).items() if at > number}


def features_with(
    published: Mapping[str, Any], values: Mapping[str, Any], inputs: Sequence[InputSpec]
) -> dict[str, FeatureValue] | None:
    """Merge published and newer values into features by column; None if an input of the model is missing.

    `published` is the user's row of the generation, `values` what `AttributeEvents.of_user` has behind its position;
    `inputs` are the feature inputs of the model. A value that an input cannot take counts as missing, as in a night.
    """
    feature_by_column: dict[str, FeatureValue] = {}
    for input_spec in inputs:
        column = str(input_spec.column)
        raw_value = values[column] if column in values else published.get(column)
        value = tuple(raw_value) if isinstance(raw_value, list) else raw_value
        if value is None or not _input_takes(input_spec, value):
            return None
        feature_by_column[column] = value
    return feature_by_column


def takes_any_attribute(values: Mapping[str, Any], inputs: Sequence[InputSpec]) -> bool:
    """True if the model takes one of these attributes, so that their newer values count as newer events."""
    return any(input_spec.column in values for input_spec in inputs)


def _input_takes(spec: InputSpec, value: FeatureValue) -> bool:
    try:
        check_features((spec,), {str(spec.column): value})
    except (InvalidInput, TypeError, ValueError):
        return False
    return True
