"""Sources of a made-up shop, drawn from a seed, in numbers that float32 adds and multiplies exactly."""

from __future__ import annotations

import datetime as dt
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.audit.values import Attribute, Vector

DIMS = 8
COUNTRIES = 6
EPOCH = 1_795_000_000
"""Time of the first interaction, in seconds since 1970: some days before the audits were first run."""

BRANDS = ("acme", "initech", "höoli", "umbrella corp", "")
TAGS = ("sale", "new", "eco", "last chance")
ATTRIBUTE_NAMES = ("brand", "tags", "price", "stock", "since")


@dataclass(frozen=True)
class Item:
    """An item of the feature table."""

    id: str
    looks_vector: Vector | None
    lift: float
    attributes: dict[str, Attribute]
    """Attributes that the item has; one that it lacks has no key."""

    def vector(self) -> Vector | None:
        """Return the output of the item tower, or None if the tower has no input."""
        if self.looks_vector is None:
            return None
        return tuple(part + self.lift * LIFT_DIRECTION[d] for d, part in enumerate(self.looks_vector))


LIFT_DIRECTION = (0.5, 0.0, -0.5, 0.0, 1.0, 0.0, 0.0, 0.25)
"""Direction that the feature `lift` moves an item's vector in."""


@dataclass(frozen=True)
class Interaction:
    """A row of the interactions: user, item and time; a weight of None is missing in the file."""

    user: str
    item: str
    time: int
    weight: float | None

    @property
    def counts(self) -> bool:
        """Whether the row is an interaction at all: it has a weight above 0."""
        return self.weight is not None and self.weight > 0


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of a world."""

    users: int = 100
    items: int = 80
    unknown_items: int = 6
    """Items of the catalogue that are not in the model's vocabulary."""
    interactions_of_one: int = 12
    with_vectors: bool = False
    """Whether some users bring a vector."""


@dataclass
class World:
    """What the sources hold now; a night reads what `write` has written."""

    seed: int
    shape: Shape
    vocabulary: tuple[str, ...]
    items: dict[str, Item]
    users: tuple[str, ...]
    countries: dict[str, int | None]
    """Rows of the feature table of users."""
    vectors: dict[str, Vector]
    interactions: list[Interaction]
    clock: int
    """Time of the next interaction."""
    written: int = 0
    """Interactions that lie in files already."""
    files: int = 0
    strangers: list[str] = field(default_factory=list)

    def draw_interactions(self, rng: random.Random, count: int) -> list[Interaction]:
        """Add interactions of random users, some without weight, some of unknown items."""
        drawn = []
        for _ in range(count):
            self.clock += rng.randrange(1, 40)
            item = rng.choice(list(self.items)) if rng.random() < 0.97 else "no-such-item"
            weight = rng.choices([1.0, 2.5, 0.0, -1.0, None], [80, 10, 4, 4, 2])[0]
            drawn.append(Interaction(rng.choice(self.users), item, self.clock, weight))
        self.interactions.extend(drawn)
        return drawn

    def change_items(self, rng: random.Random, count: int) -> None:
        """Give some items another vector or other attributes."""
        for id_ in rng.sample(list(self.items), count):
            item = self.items[id_]
            if rng.random() < 0.5 and item.looks_vector is not None:
                self.items[id_] = replace(item, looks_vector=draw_looks(rng))
            else:
                self.items[id_] = replace(item, attributes=draw_attributes(rng))

    def write(self, folder: Path) -> None:
        """Write tables of features and, as one more file, the interactions that no file has yet."""
        clicks = folder / "interactions"
        clicks.mkdir(parents=True, exist_ok=True)
        recent = self.interactions[self.written :]
        if recent:
            rows = list(recent)
            random.Random(self.seed + self.files).shuffle(rows)
            _write(
                clicks / f"{self.files:05d}.parquet",
                {
                    "user": pa.array([row.user for row in rows], pa.string()),
                    "item": pa.array([row.item for row in rows], pa.string()),
                    "timestamp": pa.array([row.time for row in rows], pa.int64()),
                    "weight": pa.array([row.weight for row in rows], pa.float64()),
                },
            )
            self.files += 1
            self.written = len(self.interactions)
        items = list(self.items.values())
        columns = {
            "item": pa.array([item.id for item in items], pa.string()),
            "looks": pa.array([item.looks_vector for item in items], pa.list_(pa.float32())),
            "lift": pa.array([item.lift for item in items], pa.float32()),
        }
        for name, kind in ATTRIBUTE_TYPES.items():
            values = [item.attributes.get(name) for item in items]
            if name == "since":
                values = [value if value is None else int(float(str(value))) for value in values]
            columns[name] = pa.array(values, kind)
        _write(folder / "items.parquet", columns)
        _write(
            folder / "users.parquet",
            {
                "user": pa.array(list(self.countries), pa.string()),
                "country": pa.array(list(self.countries.values()), pa.int64()),
            },
        )
        if self.vectors:
            _write(
                folder / "vectors.parquet",
                {
                    "user": pa.array(list(self.vectors), pa.string()),
                    "vector": pa.array(list(self.vectors.values()), pa.list_(pa.float32())),
                },
            )


ATTRIBUTE_TYPES = {
    "brand": pa.string(),
    "tags": pa.list_(pa.string()),
    "price": pa.float64(),
    "stock": pa.bool_(),
    "since": pa.timestamp("s"),
}


def _write(path: Path, columns: dict[str, pa.Array]) -> None:
    waiting = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), waiting)
    waiting.rename(path)


def make_world(seed: int, shape: Shape) -> World:
    """Draw a world; the same seed and shape give the same one."""
    rng = random.Random(f"world {seed}")
    ids = [_item_id(number) for number in range(shape.items)]
    items: dict[str, Item] = {}
    looks_vectors = [draw_looks(rng) for _ in range(shape.items)]
    for number, id_ in enumerate(ids):
        twin = number - rng.randrange(1, 4)
        if rng.random() < 0.2 and twin >= 0:
            looks_vectors[number] = looks_vectors[twin]
        lift = 0.0 if rng.random() < 0.7 else rng.choice([-1.0, 0.5, 1.0])
        items[id_] = Item(id_, looks_vectors[number], lift, draw_attributes(rng))
    lacking = ids[rng.randrange(shape.items)]
    items[lacking] = replace(items[lacking], looks_vector=None)
    vocabulary = tuple(id_ for id_ in ids[: shape.items - shape.unknown_items])

    users = tuple(_user_id(number) for number in range(shape.users))
    countries: dict[str, int | None] = {}
    interactions: list[Interaction] = []
    vectors: dict[str, Vector] = {}
    clock = EPOCH
    popular = [rng.random() ** 2 for _ in ids]
    for user in users:
        kind = rng.choices(["both", "features", "history", "gap"], [70, 10, 12, 8])[0]
        if kind != "history":
            countries[user] = rng.randrange(COUNTRIES) if kind != "gap" else None
        if shape.with_vectors and rng.random() < 0.3:
            vectors[user] = tuple(rng.randrange(-16, 17) / 8 for _ in range(DIMS))
        if kind == "features":
            continue
        for _ in range(rng.randrange(1, 2 * shape.interactions_of_one)):
            clock += rng.randrange(1, 40)
            item = rng.choices(ids, popular)[0] if rng.random() < 0.97 else "no-such-item"
            weight = rng.choices([1.0, 2.5, 0.0, -1.0, None], [80, 10, 4, 4, 2])[0]
            interactions.append(Interaction(user, item, clock, weight))
    return World(seed, shape, vocabulary, items, users, countries, vectors, interactions, clock + 1)


def draw_looks(rng: random.Random) -> Vector:
    """Draw a vector of multiples of an eighth."""
    return tuple(rng.randrange(-8, 9) / 8 for _ in range(DIMS))


def draw_attributes(rng: random.Random) -> dict[str, Attribute]:
    """Draw attributes with gaps; a list may be empty, which counts as lacking."""
    drawn: dict[str, Attribute] = {}
    if rng.random() < 0.85:
        drawn["brand"] = rng.choice(BRANDS)
    if rng.random() < 0.8:
        tags = rng.sample(TAGS, rng.randrange(0, 3))
        if tags:
            drawn["tags"] = tags
    if rng.random() < 0.85:
        drawn["price"] = rng.randrange(0, 200) / 4
    if rng.random() < 0.85:
        drawn["stock"] = rng.random() < 0.6
    if rng.random() < 0.8:
        drawn["since"] = float(EPOCH + 86_400 * rng.randrange(-30, 30))
    return drawn


def iso_time(seconds: float) -> str:
    """Write a time as requests may: ISO 8601, UTC."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _item_id(number: int) -> str:
    forms = ("i-{:05d}", "{}", "i/{}/x", "itém {}", "i%2F{}", 'q"{}', "ß{}", "{:04d}", "i?{}&k=1")
    return forms[number % len(forms)].format(number + 1000 if number % len(forms) == 1 else number)


def _user_id(number: int) -> str:
    forms = ("u-{:05d}", "{}", "u/{}", "usér {}", "u%{}", "u\N{CRAB}{}", "{:05d}x")
    return forms[number % len(forms)].format(number)
