"""Event as a value, and its encoding in the stream. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import orjson

from cache.errors import CorruptArtefact
from cache.format.ids import FeatureValue, canonical_id

EventKind = Literal["interaction", "user", "item"]

EVENT_FIELD: Final = b"e"
"""Field of a stream entry that holds the event."""

_TIME_US_END: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Event:
    """Event: an interaction of a user with an item, or attribute values of a user or of an item.

    `id` makes the event idempotent: of two events with the same `source_id` and `id` the second is ignored. `at_us` is
    its time in microseconds since 1970. `attributes` are values set for the user or the item. An event of an item alone
    may contain `features` or a `vector`, so that answers can name the item before a night knows it.
    """

    id: str
    at_us: int
    user: bytes | None = None
    item: bytes | None = None
    type: str | None = None
    weight: float = 1.0
    attributes: Mapping[str, Any] | None = None
    features: Mapping[str, FeatureValue] | None = None
    vector: tuple[float, ...] | None = None

    @property
    def kind(self) -> EventKind:
        """Kind of the event; an interaction has a user and an item."""
        if self.user is not None and self.item is not None:
            return "interaction"
        return "item" if self.user is None else "user"

    @property
    def source_id(self) -> bytes:
        """Id of the event's user, else of its item; events are bounded and deduplicated per source."""
        raw_id = self.item if self.user is None else self.user
        return b"" if raw_id is None else raw_id

    @property
    def is_in_history(self) -> bool:
        """Whether the event is part of its user's history; as in a night, its weight must be above 0."""
        return self.kind == "interaction" and self.weight > 0

    @property
    def set_value_by_attribute(self) -> Mapping[str, Any]:
        """Values by name that the event sets: an item's features, and attributes, which take precedence."""
        if not self.features:
            return self.attributes or {}
        return {**self.features, **(self.attributes or {})}

    def to_bytes(self) -> bytes:
        """Return JSON without unset fields."""
        json_fields: dict[str, Any] = {"id": self.id, "at_us": self.at_us}
        for name, raw_id in (("user", self.user), ("item", self.item)):
            if raw_id is not None:
                json_fields[name] = raw_id.decode()
        if self.type is not None:
            json_fields["type"] = self.type
        if self.weight != 1.0:
            json_fields["weight"] = self.weight
        for name in ("attributes", "features", "vector"):
            if (field_value := getattr(self, name)) is not None:
                json_fields[name] = field_value
        return orjson.dumps(json_fields)

    @classmethod
    def from_bytes(cls, event_bytes: bytes) -> Self:
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
        try:
            document = orjson.loads(event_bytes)
            user, item, vector = document.get("user"), document.get("item"), document.get("vector")
            event = cls(
                document["id"],
                document["at_us"],
                None if user is None else canonical_id(user),
                None if item is None else canonical_id(item),
                document.get("type"),
                document.get("weight", 1.0),
                document.get("attributes"),
                document.get("features"),
                None if vector is None else tuple(vector),
            )
            if event.user is None and event.item is None:
                raise ValueError("it has neither a user nor an item")
            if not (
                isinstance(event.id, str)
                and isinstance(event.at_us, int)
                and -_TIME_US_END <= event.at_us < _TIME_US_END
                and isinstance(event.weight, int | float)
                and isinstance(event.type, str | None)
            ):
                raise ValueError("its id and type must be texts, its time and weight numbers")
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptArtefact(f"not an event: {error}") from error
        return event
