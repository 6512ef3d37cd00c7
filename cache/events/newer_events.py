"""In-memory store of newer events: packed events of users, and the newest attribute values that events set."""

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

VALUES_PER_ENTITY_MAX: Final = 64
"""Attributes kept per user or item, those set last; with an unlimited number, every further event would be slow to
add."""

_RECENT_ITEMS_MAX: Final = 4_096
"""Number of recently changed items that are checked one by one."""

_USER_OVERHEAD_BYTES: Final = 180
"""Approximate memory of a user besides the id and the packed events."""

_ENTITY_OVERHEAD_BYTES: Final = 180
"""Approximate memory of an entity besides the id and the packed values."""

_USER_EVENT_TAIL_FORMAT: Final = struct.Struct("<qQH")
"""Format of the bytes after an item's id: event time (microseconds), position number, and length of the id in bytes."""

_VALUES_HEADER_FORMAT: Final = struct.Struct("<Q")
"""Format of the newest position number, which precedes an entity's values as JSON: `{attribute: [number, value]}`."""


class UserEvent(NamedTuple):
    """Event of a user: item, time (microseconds since 1970), and position number.

    The item is empty if the event set attributes of the user, whose values are in `AttributeEvents`.
    """

    item: bytes
    at_us: int
    position_number: int


class UserEvents:
    """Events of users after some position; a lookup for a user without events costs one dictionary access.

    Events must be added in order of position; one at or before the last position is ignored.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.last_number = 0
        """Number of the newest position that was added."""
        self.complete_after_number = 0
        """Position number after which all events up to `last_number` are present."""
        self.packed_events_by_user: dict[bytes, bytes] = {}
        """Packed events by user; a user's bytes object is replaced only when the user has another event."""

    def __len__(self) -> int:
        """Return the number of users with events."""
        return len(self.packed_events_by_user)

    def __contains__(self, user: bytes) -> bool:
        return user in self.packed_events_by_user

    def add(self, position: Position, event: Event) -> bool:
        """Add the next event; False if its position was added before, True even if it changes no user's input."""
        position_number = position.number
        if position_number <= self.last_number:
            return False
        self.last_number = position_number
        user, item = event.user, event.item
        if event.kind == "user" and event.attributes:
            item = b""
        elif not event.is_in_history:
            return True
        if user is None or item is None:
            return True
        previous_packed = self.packed_events_by_user.get(user)
        if previous_packed is None:
            previous_packed = b""
            self.size_bytes += _USER_OVERHEAD_BYTES + len(user)
        packed_event = item + _USER_EVENT_TAIL_FORMAT.pack(event.at_us, position_number, len(item))
        self.packed_events_by_user[user] = previous_packed + packed_event
        self.size_bytes += len(packed_event)
        return True

    def has_newer_event(self, user: bytes, position_number: int) -> bool:
        """True if the user has an event after this position number."""
        packed = self.packed_events_by_user.get(user)
        return (
            packed is not None
            and _USER_EVENT_TAIL_FORMAT.unpack_from(packed, len(packed) - _USER_EVENT_TAIL_FORMAT.size)[1]
            > position_number
        )

    def has_newer_item(self, user: bytes, position_number: int) -> bool:
        """True if one of the user's events after this position number has an item."""
        return any(event.item for event in self._events_backwards(user, position_number))

    def list_events_after(self, user: bytes, position_number: int) -> list[UserEvent]:
        """Return the user's events after this position number, in order."""
        return list(self._events_backwards(user, position_number))[::-1]

    def drop_until(self, position_number: int, users: Iterable[bytes] | None = None) -> int:
        """Forget events up to this position number, of all or of some users; return how many users have none left."""
        forgotten_count, self.complete_after_number = 0, max(self.complete_after_number, position_number)
        for user in list(self.packed_events_by_user) if users is None else users:
            if (previous_packed := self.packed_events_by_user.get(user)) is None:
                continue
            remaining_events = self.list_events_after(user, position_number)
            if not remaining_events:
                self.forget(user)
                forgotten_count += 1
                continue
            packed = b"".join(
                event.item + _USER_EVENT_TAIL_FORMAT.pack(event.at_us, event.position_number, len(event.item))
                for event in remaining_events
            )
            if len(packed) < len(previous_packed):
                self.packed_events_by_user[user] = packed
                self.size_bytes -= len(previous_packed) - len(packed)
        return forgotten_count

    def replace_contents(self, replacement: "UserEvents") -> None:
        """Replace the contents by those of `replacement`, which must not be used afterwards.

        Lookups continue meanwhile.
        """
        deque(self.replace_in_turns(replacement), maxlen=0)

    def replace_in_turns(self, replacement: "UserEvents") -> Iterator[None]:
        """Replace the contents by those of `replacement`, yielding every ENTITIES_AT_ONCE users.

        Until the generator ends, some users have their old events and others the new ones.
        """
        packed_by_user, new_packed_by_user = self.packed_events_by_user, replacement.packed_events_by_user
        for count, user in enumerate(
            [*packed_by_user, *(user for user in new_packed_by_user if user not in packed_by_user)], 1
        ):
            packed = new_packed_by_user.get(user)
            if packed is None:
                del packed_by_user[user]
            elif (
                packed_by_user.get(user) != packed
            ):  # keep the bytes object if it is equal, as ready answers compare by identity
                packed_by_user[user] = packed
            if not count % ENTITIES_AT_ONCE:
                yield
        self.size_bytes, self.last_number, self.complete_after_number = (
            replacement.size_bytes,
            replacement.last_number,
            replacement.complete_after_number,
        )

    def prepend(self, earlier_events: "UserEvents", users: Iterable[bytes]) -> None:
        """Prepend the earlier events of these users; all of them are older than the events here."""
        for user in users:
            earlier_packed, newer_packed = (
                earlier_events.packed_events_by_user[user],
                self.packed_events_by_user.get(user),
            )
            self.packed_events_by_user[user] = earlier_packed if newer_packed is None else earlier_packed + newer_packed
            self.size_bytes += len(earlier_packed) + (_USER_OVERHEAD_BYTES + len(user) if newer_packed is None else 0)

    def forget(self, user: bytes) -> None:
        """Forget the events of an erased user."""
        packed = self.packed_events_by_user.pop(user, None)
        if packed is not None:
            self.size_bytes -= _USER_OVERHEAD_BYTES + len(user) + len(packed)

    def _events_backwards(self, user: bytes, after_position_number: int) -> Iterator[UserEvent]:
        packed_events = self.packed_events_by_user.get(user, b"")
        event_end = len(packed_events)
        while event_end:
            tail_offset = event_end - _USER_EVENT_TAIL_FORMAT.size
            at_us, event_number, id_bytes = _USER_EVENT_TAIL_FORMAT.unpack_from(packed_events, tail_offset)
            if event_number <= after_position_number:
                return
            event_end = tail_offset - id_bytes
            yield UserEvent(packed_events[event_end:tail_offset], at_us, event_number)


class AttributeValue(NamedTuple):
    """Attribute value that an event set, with its item or user; None clears the attribute."""

    entity_id: bytes
    attribute: str
    new_value: Any


class NewerValues(NamedTuple):
    """Values set between two position numbers, still packed: usable in any thread."""

    after_position_number: int
    until_position_number: int
    ids_and_packed_values: tuple[tuple[bytes, bytes], ...] = ()

    def iterate_values(self) -> Iterator[AttributeValue]:
        """Yield the values; entities come in the order of their newest positions."""
        for entity_id, packed in self.ids_and_packed_values:
            if _newest_position_number(packed) <= self.after_position_number:
                continue
            for attribute, value in _values_after(packed, self.after_position_number).items():
                yield AttributeValue(entity_id, attribute, value)


class ValuesOfItems(NamedTuple):
    """Values of items set after a position number, still packed: usable in any thread."""

    after_position_number: int
    packed_values_by_item: Mapping[bytes, bytes]

    def values_of_item(self, item_id: bytes) -> dict[str, Any]:
        """Return an item's values by attribute; empty for an item without any."""
        packed = self.packed_values_by_item.get(item_id)
        return {} if packed is None else _values_after(packed, self.after_position_number)


class AttributeEvents:
    """Newest attribute values of items and users; a lookup for one without values costs one dictionary access.

    Events must be added in order of position. Beyond VALUES_PER_ENTITY_MAX the oldest values of an entity are dropped;
    callers bound the total memory.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.last_number = 0
        """Number of the newest position that was added."""
        self.complete_after_number = 0
        """Position number after which all values up to `last_number` are present, except for dropped values."""
        self.newest_item_number = 0
        """Number of the newest position that set a value of an item."""
        self.refusal_count = 0
        """Number of events for which older values of their entity were dropped."""
        # By newest position, newest last.
        self._packed_values_by_item: dict[bytes, bytes] = {}
        self._packed_values_by_user: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        """Return the number of items and users with values."""
        return len(self._packed_values_by_item) + len(self._packed_values_by_user)

    def add(self, position: Position, event: Event) -> bool:
        """Add the next event; False if its position was added before, True even if it sets no value."""
        position_number = position.number
        if position_number <= self.last_number:
            return False
        self.last_number = position_number
        kind, entity_id = event.kind, event.source_id
        if kind == "interaction" or not (values := event.set_value_by_attribute):
            return True
        packed_by_entity = self._packed_values_by_item if kind == "item" else self._packed_values_by_user
        previous_packed = packed_by_entity.get(entity_id)
        numbered_values = {} if previous_packed is None else _unpack_values(previous_packed)
        numbered_values |= {name: [position_number, value] for name, value in values.items()}
        packed_values = _pack_values(position_number, numbered_values)
        added_bytes = (
            len(packed_values) - len(previous_packed)
            if previous_packed
            else len(packed_values) + len(entity_id) + _ENTITY_OVERHEAD_BYTES
        )
        self.refusal_count += len(numbered_values) > VALUES_PER_ENTITY_MAX
        packed_by_entity.pop(entity_id, None)
        packed_by_entity[entity_id] = packed_values
        self.size_bytes += added_bytes
        if kind == "item":
            self.newest_item_number = position_number
        return True

    def item_values_since(self, position_number: int) -> NewerValues:
        """Return the values of items set after this position; cheap, however many there are."""
        until_number = max(position_number, self.newest_item_number)
        newer_values: list[tuple[bytes, bytes]] = []
        for item_id, packed in islice(reversed(self._packed_values_by_item.items()), _RECENT_ITEMS_MAX):
            if _newest_position_number(packed) <= position_number:
                return NewerValues(position_number, until_number, tuple(reversed(newer_values)))
            newer_values.append((item_id, packed))
        # Copy all of them in one C call; unpacking selects the newer ones.
        return NewerValues(position_number, until_number, tuple(self._packed_values_by_item.items()))

    def values_of_user(self, user: bytes, position_number: int) -> dict[str, Any]:
        """Return the user's values set after this position, by attribute."""
        packed = self._packed_values_by_user.get(user)
        return {} if packed is None else _values_after(packed, position_number)

    def values_of_items(self, item_ids: Iterable[bytes], position_number: int) -> "ValuesOfItems":
        """Return the values of some items set after this position."""
        packed_by_item = self._packed_values_by_item
        return ValuesOfItems(
            position_number, {item_id: packed_by_item[item_id] for item_id in item_ids if item_id in packed_by_item}
        )

    def items_with_values(self, item_ids: frozenset[bytes]) -> set[bytes]:
        """Return the ids among `item_ids` for which events set values."""
        return self._packed_values_by_item.keys() & item_ids

    def user_newest_position_number(self, user: bytes) -> int:
        """Return the number of the newest position that set a value of the user; 0 for none."""
        packed = self._packed_values_by_user.get(user)
        return 0 if packed is None else _newest_position_number(packed)

    def values_set_after(self, entity_kind: str, position_number: int) -> dict[bytes, dict[str, Any]]:
        """Return the values set after this position, of the entities of one kind, `item` or `user`."""
        packed_by_entity = self._packed_values_by_item if entity_kind == "item" else self._packed_values_by_user
        return {
            entity_id: _values_after(packed, position_number)
            for entity_id, packed in packed_by_entity.items()
            if _newest_position_number(packed) > position_number
        }

    def drop_until(self, position_number: int, forgotten_entities_max: int = sys.maxsize) -> int:
        """Forget at most `forgotten_entities_max` entities without a value after this position; return their number."""
        forgotten_count, self.complete_after_number = 0, max(self.complete_after_number, position_number)
        for packed_by_entity in (self._packed_values_by_item, self._packed_values_by_user):
            forgotten_ids: list[bytes] = []
            for entity_id, packed in packed_by_entity.items():
                if (
                    _newest_position_number(packed) > position_number
                    or forgotten_count + len(forgotten_ids) >= forgotten_entities_max
                ):
                    break
                forgotten_ids.append(entity_id)
            for entity_id in forgotten_ids:
                self._forget(packed_by_entity, entity_id)
            forgotten_count += len(forgotten_ids)
        return forgotten_count

    def replace_contents(self, replacement: "AttributeEvents") -> None:
        """Take over the contents of `replacement`, which must not be used afterwards."""
        self._packed_values_by_item, self._packed_values_by_user = (
            replacement._packed_values_by_item,
            replacement._packed_values_by_user,
        )
        self.size_bytes, self.last_number = replacement.size_bytes, replacement.last_number
        self.newest_item_number, self.complete_after_number = (
            replacement.newest_item_number,
            replacement.complete_after_number,
        )
        self.refusal_count = max(self.refusal_count, replacement.refusal_count)

    def prepend(self, earlier_events: "AttributeEvents") -> None:
        """Add the values of `earlier_events`, whose positions are earlier; values set here take precedence."""
        deque(self.prepend_in_turns(earlier_events), maxlen=0)

    def prepend_in_turns(self, earlier_events: "AttributeEvents") -> Iterator[None]:
        """Add the values of `earlier_events`, yielding between batches of entities.

        Add no event before the iterator ends.
        """
        merged_items = yield from self._merge_earlier(
            self._packed_values_by_item, earlier_events._packed_values_by_item
        )
        merged_users = yield from self._merge_earlier(
            self._packed_values_by_user, earlier_events._packed_values_by_user
        )
        self._packed_values_by_item, self._packed_values_by_user = merged_items, merged_users
        self.newest_item_number = max(self.newest_item_number, earlier_events.newest_item_number)
        self.refusal_count += earlier_events.refusal_count

    def _merge_earlier(
        self, packed_values_by_id: dict[bytes, bytes], earlier_packed_values: dict[bytes, bytes]
    ) -> Generator[None, None, dict[bytes, bytes]]:
        """Merge two mappings, each already in the order of its newest positions, into one in that order."""
        if not earlier_packed_values:
            return packed_values_by_id
        only_earlier_entities = (
            (entity_id, packed)
            for entity_id, packed in earlier_packed_values.items()
            if entity_id not in packed_values_by_id
        )
        ordered_entities = heapq.merge(
            packed_values_by_id.items(), only_earlier_entities, key=lambda entity: _newest_position_number(entity[1])
        )
        merged_by_id: dict[bytes, bytes] = {}
        added_bytes = 0
        for count, (entity_id, packed) in enumerate(ordered_entities, 1):
            if entity_id not in packed_values_by_id:
                merged_by_id[entity_id] = packed
                added_bytes += len(packed) + len(entity_id) + _ENTITY_OVERHEAD_BYTES
            elif entity_id in earlier_packed_values:
                merged_by_id[entity_id] = _merge_values(earlier_packed_values[entity_id], packed)
                added_bytes += len(merged_by_id[entity_id]) - len(packed)
            else:
                merged_by_id[entity_id] = packed
            if not count % ENTITIES_AT_ONCE:
                yield
        self.size_bytes += added_bytes
        return merged_by_id

    def forget(self, entity_kind: str, entity_id: bytes) -> None:
        """Forget the values of an erased item or user."""
        self._forget(self._packed_values_by_item if entity_kind == "item" else self._packed_values_by_user, entity_id)

    def _forget(self, packed_values_by_entity: dict[bytes, bytes], entity_id: bytes) -> None:
        packed_values = packed_values_by_entity.pop(entity_id, None)
        if packed_values is not None:
            self.size_bytes -= len(packed_values) + len(entity_id) + _ENTITY_OVERHEAD_BYTES


def _newest_position_number(packed_values: bytes) -> int:
    return int(_VALUES_HEADER_FORMAT.unpack_from(packed_values)[0])


def _unpack_values(packed_values: bytes) -> dict[str, list[Any]]:
    numbered_value_by_attribute: dict[str, list[Any]] = orjson.loads(packed_values[_VALUES_HEADER_FORMAT.size :])
    return numbered_value_by_attribute


def _pack_values(newest_position_number: int, numbered_value_by_attribute: dict[str, list[Any]]) -> bytes:
    """Pack the values of one entity with this newest position number; keep the newest VALUES_PER_ENTITY_MAX.

    The choice depends only on the stream, not on where a process began to read it, so replicas agree.
    """
    if len(numbered_value_by_attribute) > VALUES_PER_ENTITY_MAX:
        newest_values = heapq.nlargest(
            VALUES_PER_ENTITY_MAX,
            numbered_value_by_attribute.items(),
            key=lambda named_value: (named_value[1][0], named_value[0]),
        )
        numbered_value_by_attribute = dict(newest_values)
    return _VALUES_HEADER_FORMAT.pack(newest_position_number) + orjson.dumps(
        numbered_value_by_attribute, option=orjson.OPT_SORT_KEYS
    )


def _merge_values(earlier_packed_values: bytes, newer_packed_values: bytes) -> bytes:
    return _pack_values(
        _newest_position_number(newer_packed_values),
        _unpack_values(earlier_packed_values) | _unpack_values(newer_packed_values),
    )


def _values_after(packed_values: bytes, position_number: int) -> dict[str, Any]:
    return {
        name: set_value
        for name, (set_number, set_value) in _unpack_values(packed_values).items()
        if set_number > position_number
    }


def merge_features(
    published_features: Mapping[str, Any], newer_values: Mapping[str, Any], feature_inputs: Sequence[InputSpec]
) -> dict[str, FeatureValue] | None:
    """Merge published and newer values into features by column; None if an input of the model is missing.

    `published_features` is the user's row in the generation; `newer_values` are the user's newer values from
    `AttributeEvents.values_of_user`; `feature_inputs` are the feature inputs of the model. A value that an input cannot
    take counts as missing, as in a night.
    """
    feature_by_column: dict[str, FeatureValue] = {}
    for input_spec in feature_inputs:
        column = str(input_spec.column)
        raw_value = newer_values[column] if column in newer_values else published_features.get(column)
        feature_value = tuple(raw_value) if isinstance(raw_value, list) else raw_value
        if feature_value is None or not _accepts_value(input_spec, feature_value):
            return None
        feature_by_column[column] = feature_value
    return feature_by_column


def usable_values(newer_values: Mapping[str, Any], feature_inputs: Sequence[InputSpec]) -> dict[str, Any]:
    """Return the newer values, by column, that an input of the model can take: none that were cleared."""
    return {
        column: newer_values[column]
        for input_spec in feature_inputs
        if (column := str(input_spec.column)) in newer_values
        and merge_features({}, newer_values, (input_spec,)) is not None
    }


def takes_any_attribute(newer_values: Mapping[str, Any], input_specs: Sequence[InputSpec]) -> bool:
    """Return whether the model takes one of these attributes, so that newer values of them count as newer events."""
    return any(input_spec.column in newer_values for input_spec in input_specs)


def _accepts_value(input_spec: InputSpec, value: FeatureValue) -> bool:
    try:
        check_features((input_spec,), {str(input_spec.column): value})
    except (InvalidInput, TypeError, ValueError):
        return False
    return True
