"""Files of a generation as its manifest lists them: those of items, and of what users had. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class Artefact:
    """File of a generation: path relative to its root, size in bytes and SHA-256.

    Raises ValueError for a path that could lead out of that root: files are fetched, written and hashed by it.
    """

    path: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        path: object = self.path
        # One file below a folder, on every system and object store.
        if (
            not isinstance(path, str)
            or {"\\", "\0"} & set(path)
            or {"", ".", ".."} & set(path.split("/"))
        ):
            raise ValueError(f"{path!r} is no path below a generation")


AttributeKind = Literal["text", "texts", "number", "flag", "time"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """Attribute of items as a column by ordinal; texts are codes into `names`, several of an item lie at `offsets`."""

    kind: AttributeKind
    values: Artefact
    offsets: Artefact | None = None
    names: Artefact | None = None
    name_offsets: Artefact | None = None

    def parts(self) -> dict[str, Artefact]:
        """Files of the column, by their names here."""
        file_by_name = {
            "values": self.values, "offsets": self.offsets, "names": self.names, "name_offsets": self.name_offsets,
        }  # fmt: skip
        return {name: file for name, file in file_by_name.items() if file is not None}


@dataclass(frozen=True, slots=True)
class ItemFiles:
    """The item table: ids by ordinal, vectors, where the model keeps each item, and attributes by name."""

    ids: Artefact
    offsets: Artefact
    vectors: Artefact
    model_index: Artefact
    count: int
    dims: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeenPart:
    """Items that the users of a shard had, in its directory's order: where each one's end (uint64), and ordinals.

    Oldest first. Where events are taken in, `times` (int64, microseconds since 1970) says when each happened last, and
    `features`, with where each user's end (uint64), what the user tower was given besides, as JSON. Where users may
    bring a vector along, `brought` is 1 for each who did (uint8), else 0.
    """

    ends: Artefact
    items: Artefact
    times: Artefact | None = None
    feature_ends: Artefact | None = None
    features: Artefact | None = None
    brought: Artefact | None = None

    @classmethod
    def of(cls, files: Iterable[Artefact]) -> Self:
        """Part of these files, each named by its ending, such as `seen/0000.ends`."""
        return cls(**{file.path.rpartition(".")[2]: file for file in files})

    @property
    def files(self) -> list[Artefact]:
        """Files that there are."""
        all_ = (self.ends, self.items, self.times, self.feature_ends, self.features, self.brought)
        return [file for file in all_ if file is not None]


@dataclass(frozen=True, slots=True)
class EventsRead:
    """Events that a generation has: those up to a position, and how many items of a history its models were given.

    `facets` has the attribute of each facet's table: events may set it anew. `namespace` is that of the stream that the
    position is of; empty: the generation's own.
    """

    until: str
    history_limit: int
    facets: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
