"""An independent model of what the documents promise: generations, events, and the answers that follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.audit.bundle import Model
from tests.audit.filters import passes
from tests.audit.values import Attribute, Json, Vector
from tests.audit.world import ATTRIBUTE_NAMES, Interaction, Item, World

Ranked = list[tuple[float, str]]
"""Scores and ids of items, best first."""

TOPK = 30
SIMILAR = 12
FACET = 20


@dataclass(frozen=True)
class Event:
    """An event as it was accepted."""

    id: str
    position: str
    time: float = 0.0
    user: str | None = None
    item: str | None = None
    weight: float = 1.0
    attributes: dict[str, object] | None = None
    features: dict[str, object] | None = None

    @property
    def is_action(self) -> bool:
        """Whether a user did something with an item that enters histories."""
        return self.user is not None and self.item is not None and self.weight > 0


@dataclass(frozen=True)
class Rules:
    """Settings of a site that decide what lists hold."""

    topk: int = TOPK
    similar: int = SIMILAR
    facet: int = FACET
    history_limit: int = 100_000
    filters: Mapping[str, Json] = field(default_factory=dict)
    facets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """What one night knew."""

    id: str
    rules: Rules
    model: Model
    items: dict[str, Vector]
    """The catalogue with its vectors."""
    attributes: dict[str, dict[str, Attribute]]
    clicks: dict[str, list[tuple[float, int, str]]]
    """Interactions of each user: time, place in the sources, item."""
    countries: dict[str, int]
    featured: frozenset[str]
    """Users of the feature table, with or without a country."""
    vectors: dict[str, Vector]
    counts: Counter[str]
    events: int
    """Number of accepted events that the generation has."""
    erased_users: frozenset[str]
    erased_items: frozenset[str]
    order: dict[str, int] = field(default_factory=dict)
    """Places of items in the catalogue, as the service was seen to order equal scores."""
    event_index_by_new_item: Mapping[str, int] = field(default_factory=dict)
    """Index of the newest event that brought each item that this night or a later one did not have at first."""

    @property
    def interactions(self) -> int:
        """Number of rows that popularity counts."""
        return sum(self.counts.values())

    def rank(self, scores: Mapping[str, float]) -> Ranked:
        """Order items: best score first, equal ones as the catalogue has them, then new items as they came."""
        last = len(self.order)
        ranked = [(score, item) for item, score in scores.items()]

        def sort_key(pair: tuple[float, str]) -> tuple[float, int, int, str]:
            score, item = pair
            return -score, self.order.get(item, last), self.event_index_by_new_item.get(item, -1), item

        return sorted(ranked, key=sort_key)

    def cut(self, ranked: Ranked, width: int, preferred: Iterable[str] = ()) -> Ranked:
        """Return the first `width` items; among equal scores at the end, preferred items stay."""
        if len(ranked) <= width:
            return ranked
        last = ranked[width - 1][0]
        sure = [pair for pair in ranked if pair[0] > last]
        equal = [pair for pair in ranked if pair[0] == last]
        preferred_items = set(preferred)
        selected_ties = sorted(equal, key=lambda pair: pair[1] not in preferred_items)[: width - len(sure)]
        return sure + [pair for pair in equal if pair in selected_ties]

    def rank_by(self, vector: Vector, items: Mapping[str, Vector]) -> Ranked:
        """Rank items by their inner product with a vector."""
        return self.rank({item: dot(vector, numbers) for item, numbers in items.items()})

    def popular(self) -> Ranked:
        """Return the defaults: items by their share of all interactions."""
        total = self.interactions
        return self.rank({item: self.counts[item] / total for item in self.items if self.counts[item]})

    def knows_user(self, user: str) -> bool:
        """Return whether the night's input names the user."""
        return user in self.clicks or user in self.featured or user in self.vectors


def dot(left_vector: Vector, right: Vector) -> float:
    """Return the inner product, which is exact for the numbers of a world."""
    return math.fsum(a * b for a, b in zip(left_vector, right, strict=True))


def make_generation(
    id_: str,
    world: World,
    model: Model,
    rules: Rules,
    events: list[Event],
    erased_users: Iterable[str] = (),
    erased_items: Iterable[str] = (),
    event_index_by_new_item: Mapping[str, int] | None = None,
) -> Generation:
    """Compute what a night over this world and these events knows."""
    gone_users, gone_items = frozenset(erased_users), frozenset(erased_items)
    table = dict(world.items)
    values: dict[str, dict[str, object]] = {}
    countries = {user: country for user, country in world.countries.items() if user not in gone_users}
    for event in events:
        if event.features is not None and event.item is not None and event.item not in world.items:
            table[event.item] = new_item(event)
        if event.attributes and event.user is None and event.item is not None:
            values.setdefault(event.item, {}).update(event.attributes)
        sets_country = event.user is not None and event.item is None and "country" in (event.attributes or {})
        if sets_country and event.user is not None and event.user not in gone_users:
            country = (event.attributes or {})["country"]
            countries[event.user] = country if isinstance(country, int) else None
    items, attributes = {}, {}
    for id_item, item in table.items():
        vector = item.vector()
        if vector is None or id_item in gone_items:
            continue
        items[id_item] = vector
        attributes[id_item] = merge_attributes(item.attributes, values.get(id_item, {}))
    clicks: dict[str, list[tuple[float, int, str]]] = {}
    counts: Counter[str] = Counter()
    rows = [row for row in world.interactions[: world.written] if row.counts]
    rows += [Interaction(event.user or "", event.item or "", 0, event.weight) for event in events if event.is_action]
    times = [float(row.time) for row in world.interactions[: world.written] if row.counts]
    times += [event.time for event in events if event.is_action]
    for source_index, (row, time) in enumerate(zip(rows, times, strict=True)):
        if row.user in gone_users or row.item in gone_items:
            continue
        if row.item in items:
            counts[row.item] += 1
            clicks.setdefault(row.user, []).append((time, source_index, row.item))
    return Generation(
        id_,
        rules,
        model,
        items,
        attributes,
        clicks,
        {user: country for user, country in countries.items() if country is not None},
        frozenset(countries),
        {user: vector for user, vector in world.vectors.items() if user not in gone_users},
        counts,
        len(events),
        gone_users,
        gone_items,
        event_index_by_new_item=event_index_by_new_item or {},
    )


def new_item(event: Event) -> Item:
    """Return the item that an event with features brought."""
    assert event.features is not None and event.item is not None
    looks_vector = event.features["looks"]
    assert isinstance(looks_vector, list)
    lift = event.features.get("lift", 0.0)
    event_values = {**event.features, **(event.attributes or {})}
    attributes = merge_attributes({}, {name: event_values[name] for name in ATTRIBUTE_NAMES if name in event_values})
    return Item(event.item, tuple(float(part) for part in looks_vector), float(str(lift)), attributes)


def merge_attributes(attributes: Mapping[str, Attribute], values: Mapping[str, object]) -> dict[str, Attribute]:
    """Apply values that events set to attributes; null, an empty list and a wrong kind clear one."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "brand": str,
        "tags": list,
        "price": (int, float),
        "stock": bool,
        "since": (int, float),
    }
    merged = dict(attributes)
    for name, value in values.items():
        if name not in kinds:
            continue
        merged.pop(name, None)
        is_right = isinstance(value, kinds[name]) and not (name in ("price", "since") and isinstance(value, bool))
        if is_right and value != []:
            merged[name] = value  # type: ignore[assignment]
    return merged


@dataclass(frozen=True)
class Input:
    """An entity of a request: an id, and what is sent to compute from."""

    id: str | None
    history: tuple[str, ...] | None = None
    country: int | None = None

    @property
    def is_sent(self) -> bool:
        """Whether there is something to compute from."""
        return bool(self.history) or self.country is not None

    def body(self) -> object:
        """Return the entity as a request has it."""
        if self.history is None and self.country is None and self.id is not None:
            return self.id
        entity: Json = {}
        if self.id is not None:
            entity["id"] = self.id
        if self.history is not None:
            entity["history"] = list(self.history)
        if self.country is not None:
            entity["features"] = {"country": self.country}
        return entity


@dataclass(frozen=True)
class UserView:
    """What a generation, events and a request say about a user."""

    vector: Vector | None
    """Vector that lists are ranked by; None: nothing personal can be computed."""
    mood: Vector | None
    history_items: frozenset[str]
    """Items that the user had by the night, or by newer events that count."""
    recent: frozenset[str]
    """Items of newer events."""
    sent_items: frozenset[str]
    """Items of the sent history."""
    events: int
    has_record: bool
    brings_vector: bool
    is_live: bool
    """Whether the vector is computed from what the request sends."""
    is_fallback: bool = False
    """Whether newer events took away what the model needs: the night's answer stands in, marked."""

    @property
    def is_stored(self) -> bool:
        """Whether the list is the night's, less what is left out."""
        if not self.has_record or self.is_live:
            return False
        return not self.events or self.brings_vector or self.is_fallback


def keep_last(items: Iterable[str]) -> list[str]:
    """Return items once each, where they stand last."""
    unique: dict[str, None] = {}
    for item in items:
        unique.pop(item, None)
        unique[item] = None
    return list(unique)


def history_of(clicks: Iterable[tuple[float, int, str]]) -> list[str]:
    """Return a user's items, oldest first, each at its last time."""
    return keep_last(item for _, _, item in sorted(clicks))


def user_view(generation: Generation, user: Input, events: list[Event]) -> UserView:
    """Compute a user's view from a generation and all events accepted so far (or that are to count)."""
    newer_events = events[generation.events :]
    user_events = [event for event in newer_events if user.id is not None and event.user == user.id]
    actions = [event for event in user_events if event.is_action]
    settings = [event for event in user_events if event.attributes is not None]
    clicks = list(generation.clicks.get(user.id or "", []))
    by_night = frozenset(item for _, _, item in clicks)
    country = generation.countries.get(user.id or "")
    night_country = country
    for event in settings:
        value = (event.attributes or {}).get("country", country)
        country = value if isinstance(value, int) else None
    is_known_user = user.id is not None and generation.knows_user(user.id)
    vector_of_own = generation.vectors.get(user.id or "")
    has_record = is_known_user and (vector_of_own is not None or night_country is not None)
    new = {event.item for event in events if event.features is not None}
    counted_events = [event for event in actions if event.item in generation.items or event.item in new]
    numbered_events = list(enumerate(counted_events, start=len(clicks)))
    with_events = clicks + [(event.time, source_index, event.item or "") for source_index, event in numbered_events]
    recent = frozenset(event.item or "" for event in actions)
    sent_items = frozenset(user.history or ())
    vector: Vector | None
    is_live = is_fallback = False
    limit = generation.rules.history_limit
    if vector_of_own is not None:
        vector = vector_of_own
    elif country is not None and (has_record or user_events):
        vector = generation.model.user_vector(history_of(with_events)[-limit:], country)
    elif has_record:
        is_fallback = True
        assert night_country is not None
        vector = generation.model.user_vector(history_of(clicks)[-limit:], night_country)
    elif user.country is not None:
        is_live = True
        actions_by_time = sorted(actions, key=lambda event: event.time)
        live_history = keep_last((*(user.history or ()), *(event.item or "" for event in actions_by_time)))
        live_history = [item for item in live_history if item in generation.items]
        vector = generation.model.user_vector(live_history[-limit:], user.country)
    else:
        vector = None
    countries = (country, night_country, user.country)
    mood_country = next((candidate_country for candidate_country in countries if candidate_country is not None), None)
    return UserView(
        vector,
        None if mood_country is None else generation.model.mood(mood_country),
        by_night | recent,
        recent,
        sent_items,
        len(actions) + len(settings),
        has_record,
        vector_of_own is not None,
        is_live,
        is_fallback,
    )


@dataclass(frozen=True)
class Day:
    """State of the day's data at a moment: attributes and new items over a generation."""

    attributes: dict[str, dict[str, Attribute]]
    new_items: dict[str, Vector]
    facets_lost: frozenset[str]

    def find_passing_items(self, expression: Json | None) -> set[str]:
        """Return the items, night's and new, that pass a filter."""
        return {
            item for item, attributes in self.attributes.items() if expression is None or passes(expression, attributes)
        }


def day_of(generation: Generation, events: list[Event]) -> Day:
    """Apply events that set values, or add items, to a generation."""
    attributes = dict(generation.attributes)
    fresh: dict[str, Vector] = {}
    values: dict[str, dict[str, object]] = {}
    new_item_by_id: dict[str, Item] = {}
    for event in events[generation.events :]:
        if event.user is not None or event.item is None:
            continue
        if event.features is not None and event.item not in generation.items:
            if event.item not in generation.erased_items:
                new_item_by_id[event.item] = new_item(event)
        elif event.attributes:
            values.setdefault(event.item, {}).update(event.attributes)
    for id_, item in new_item_by_id.items():
        vector = item.vector()
        assert vector is not None
        fresh[id_] = vector
        attributes[id_] = merge_attributes(item.attributes, values.get(id_, {}))
    for id_, item_values in values.items():
        if id_ in generation.items:
            attributes[id_] = merge_attributes(generation.attributes[id_], item_values)
    return Day(attributes, fresh, frozenset(values))
