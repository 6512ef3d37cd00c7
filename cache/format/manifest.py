"""Manifest of a generation: its tables, files, models, filters and facts as one immutable value. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import orjson

from cache.errors import CorruptArtefact
from cache.formats import FORMATS, MANIFEST, demand_readable
from cache.records import Kind, Layout

if TYPE_CHECKING:
    from pydantic import TypeAdapter

AttributeKind = Literal["text", "texts", "number", "flag", "time"]
EntityKind = Literal["user", "item"]

MANIFEST_FORMAT: Final = FORMATS[MANIFEST].written_version
"""Version of the manifest's fields and of the files it lists; records have a separate version."""

FORMAT_WITH_WEIGHTS: Final = 2
"""Version of a manifest with a model whose weights are in a second file."""

FORMAT_WITH_ATTRIBUTES: Final = 3
"""Version of a manifest whose items have attributes."""

FORMAT_WITH_FILTERS: Final = 4
"""Version of a manifest with named filters or facets."""

FORMAT_WITH_EVENTS: Final = 5
"""Version of a manifest that states which events the generation includes and lists the users' inputs."""

FEATURE_ONLY_USERS_FACT: Final = "featured_users"
"""Fact of a manifest: true if users who appear only in the feature table have records."""

FACET_PREFIX: Final = "facet."
"""Prefix of the entity set of a facet's values; the table's name is appended."""

GENERATION_PATTERN = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}")
"""Generation id: `data_until` in UTC, then a digest of configuration, bundle and inputs."""

CUT_CHARS = len("20260131T000000Z")
"""Number of characters of `data_until` in a generation id; ids with older data sort first."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """File of a generation: path relative to the generation's root, size in bytes and SHA-256.

    Raises ValueError for a path that could lead outside that root, because files are fetched, written and hashed at it.
    """

    path: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        path: object = self.path
        # Paths must name a file below the folder on every system and object store.
        if not isinstance(path, str) or {"\\", "\0"} & set(path) or {"", ".", ".."} & set(path.split("/")):
            raise ValueError(f"{path!r} is not a path below a generation")


@dataclass(frozen=True, slots=True)
class Attribute:
    """Attribute of items as a column by ordinal.

    Texts are codes into `names`, `offsets` delimits the lists of several values.
    """

    kind: AttributeKind
    values: Artefact
    offsets: Artefact | None = None
    names: Artefact | None = None
    name_offsets: Artefact | None = None

    def file_by_part(self) -> dict[str, Artefact]:
        """Return the files of the column by their field names."""
        file_by_name = {
            "values": self.values, "offsets": self.offsets, "names": self.names, "name_offsets": self.name_offsets,
        }  # fmt: skip
        return {name: file for name, file in file_by_name.items() if file is not None}


@dataclass(frozen=True, slots=True)
class ItemFiles:
    """Files of the item table: ids by ordinal, vectors, model indices, and attributes by name."""

    ids: Artefact
    offsets: Artefact
    vectors: Artefact
    model_index: Artefact
    count: int
    dims: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeenPart:
    """Histories of a shard's users, in the order of its directory: each user's end (uint64), and item ordinals.

    Histories are oldest first. If events are accepted, `times` (int64, microseconds since 1970) has the latest time of
    each item, and `features`, with `feature_ends` (each user's end, uint64), has the other inputs of the user tower as
    JSON. If a source gives users' vectors, `brought` (uint8) is 1 for each user with one, else 0.
    """

    ends: Artefact
    items: Artefact
    times: Artefact | None = None
    feature_ends: Artefact | None = None
    features: Artefact | None = None
    brought: Artefact | None = None

    @classmethod
    def of(cls, files: Iterable[Artefact]) -> Self:
        """Build from files, identified by their endings, such as `seen/0000.ends`."""
        return cls(**{file.path.rpartition(".")[2]: file for file in files})

    @property
    def files(self) -> list[Artefact]:
        """Files of the part that exist."""
        possible_files = (self.ends, self.items, self.times, self.feature_ends, self.features, self.brought)
        return [file for file in possible_files if file is not None]


@dataclass(frozen=True, slots=True)
class IncludedEvents:
    """Events that a generation includes: all up to a position. Also the history length that its models were given.

    `facets` has the attribute of each facet's table, whose values events may change. `namespace` is the namespace of
    the position's stream; empty: the generation's own.
    """

    until: str
    history_limit: int
    facets: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryPart:
    """Shard of sorted hashes; `first_hash` is the start of the shard's range, not its first entity."""

    first_hash: int
    count: int
    file: Artefact


@dataclass(frozen=True, slots=True)
class EntitySet:
    """Entities of one kind, or a facet's values, sorted by hash; tables of the same entity share it."""

    name: str
    seed: int
    count: int
    parts: tuple[DirectoryPart, ...]


@dataclass(frozen=True, slots=True)
class TablePart:
    """Shard of a table's pages in one file; `sums` holds the xxh3-64 of every page as uint64."""

    first_page: int
    pages: int
    count: int
    file: Artefact
    sums: Artefact


@dataclass(frozen=True, slots=True)
class Producer:
    """Producer of live records for a table: its kind, model and index."""

    kind: Literal["topk", "similar", "tower", "value", "none"]
    model: str | None = None
    index: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Table of one kind of prediction for one kind of entity."""

    name: str
    entity: str
    producer: Producer
    layout: Layout
    records_per_page: int
    parts: tuple[TablePart, ...]
    labels: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """Kind of the records: topk, vector or value."""
        return self.layout.kind

    @property
    def is_facet(self) -> bool:
        """Whether the entities are values of an attribute, for which no model can compute a record."""
        return self.entity.startswith(FACET_PREFIX)

    @property
    def page_bytes(self) -> int:
        """Size of a full page in bytes."""
        return self.records_per_page * self.layout.size_bytes

    @property
    def page_count(self) -> int:
        """Number of pages of all parts."""
        return sum(part.pages for part in self.parts)

    def locate_record(self, part_index: int, position_in_part: int) -> tuple[int, int]:
        """Return (page, byte offset in the page) of the record at `position_in_part` within part `part_index`."""
        page_number, slot_in_page = divmod(position_in_part, self.records_per_page)
        return self.parts[part_index].first_page + page_number, slot_in_page * self.layout.size_bytes


@dataclass(frozen=True, slots=True)
class Model:
    """ONNX model of the generation; `spec` is the JSON of a `cache.model.tower.TowerSpec`.

    `weights` is the file for weights that did not fit into `fp32`, if there is one; the int8 form never has one.
    """

    name: str
    fp32: Artefact
    int8: Artefact | None
    digest: str
    spec: Mapping[str, Any]
    agreement: Mapping[str, Any] = field(default_factory=dict)
    weights: Artefact | None = None

    @property
    def fp32_files(self) -> tuple[Artefact, ...]:
        """Files of the model in full precision."""
        return (self.fp32,) if self.weights is None else (self.fp32, self.weights)


@dataclass(frozen=True, slots=True)
class Index:
    """FAISS index over the item vectors; positions are ordinals."""

    metric: Literal["inner_product", "cosine"]
    kind: str
    file: Artefact
    recall: float | None = None


@dataclass(frozen=True, slots=True)
class NamedFilter:
    """Named filter for requests, with the expression in the form of a request.

    `tables` has the tables of lists made under this filter, by the name of the requested table.
    """

    expression: Mapping[str, Any]
    tables: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of one generation; `data_until` and `created_at` are Unix seconds."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    namespace: str
    generation: str
    data_until: int
    created_at: int
    bundle_digest: str
    inputs_digest: str
    entity_sets: Mapping[str, EntitySet]
    items: ItemFiles
    tables: Mapping[str, Table]
    models: Mapping[str, Model]
    indexes: Mapping[str, Index]
    defaults: Artefact
    gates: tuple[Mapping[str, Any], ...]
    timings: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    seen: tuple[SeenPart, ...] = ()
    filters: Mapping[str, NamedFilter] = field(default_factory=dict)
    events: IncludedEvents | None = None
    format: int = MANIFEST_FORMAT

    def to_bytes(self) -> bytes:
        """Return readable JSON with sorted keys: equal manifests have equal bytes."""
        document = asdict(self)
        for model in document["models"].values():
            if model["weights"] is None:  # format 1 lacks this field
                del model["weights"]
        if not document["seen"] and not document["items"].get("attributes"):  # format 2 lacks these fields
            del document["seen"]
            document["items"].pop("attributes", None)
        if not document["filters"]:  # format 3 lacks this field
            del document["filters"]
        if document["events"] is None:  # format 4 lacks these fields
            del document["events"]
            for part in document.get("seen", ()):
                for name in ("times", "feature_ends", "features", "brought"):
                    del part[name]
        elif not document["events"]["namespace"]:
            del document["events"]["namespace"]
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @staticmethod
    def from_bytes(manifest_bytes: bytes) -> "Manifest":
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
        try:
            document = orjson.loads(manifest_bytes)
            demand_readable(MANIFEST, document["format"], f"the manifest of {document.get('generation')}")
            manifest = _manifest_adapter().validate_json(manifest_bytes)
            if not all({"rule", "passed"} <= gate.keys() for gate in manifest.gates):
                raise ValueError("a gate without `rule` or `passed`")
            return manifest
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise CorruptArtefact(f"not a manifest: {error}") from error

    def served_artefacts(self) -> list[Artefact]:
        """Return every file that a serving host needs; files of pages are not needed, since pages are in Redis."""
        items = self.items
        files = [items.ids, items.offsets, items.vectors, items.model_index, self.defaults]
        files += [artefact for attribute in items.attributes.values() for artefact in attribute.file_by_part().values()]
        files += [artefact for part in self.seen for artefact in part.files]
        files += [part.file for entities in self.entity_sets.values() for part in entities.parts]
        files += [index.file for index in self.indexes.values()]
        for model in self.models.values():
            files += [*model.fp32_files, *([model.int8] if model.int8 else [])]
        return files

    @property
    def stored_tables(self) -> dict[str, Table]:
        """All tables with pages by their own names: those that requests name, and those made under filters."""
        filtered_tables = [table for named_filter in self.filters.values() for table in named_filter.tables.values()]
        return {**self.tables, **{table.name: table for table in filtered_tables}}

    def page_artefacts(self) -> list[Artefact]:
        """Return every file of pages and their checksums."""
        parts = [part for table in self.stored_tables.values() for part in table.parts]
        return [artefact for part in parts for artefact in (part.file, part.sums)]


@cache
def _manifest_adapter() -> "TypeAdapter[Manifest]":
    from pydantic import TypeAdapter  # takes 0.1 s; not needed to build a manifest

    return TypeAdapter(Manifest)
