"""Reports of a night's steps: their JSON in the store, a class for each, and the name under which each is stored.

A report is stored and passed on by Airflow and the shell as JSON, so its class only describes that JSON. Optional
fields are `NotRequired`. An older release may have written the report of an earlier generation: readers use `get` for
fields that were added later.
"""

from collections.abc import Mapping
from typing import Any, Final, Generic, NotRequired, TypedDict, TypeVar

from cache.format.manifest import Artefact, AttributeKind
from cache.model.ranking import Metric
from precompute.partitions.catalogue import CatalogueFields
from precompute.partitions.night_input import EventFields
from precompute.releases.replication import VerifyReport
from precompute.sources.files import InputEntry
from precompute.sources.plausibility import RowCountsReport
from precompute.sources.unusable import UnusableReport

ReportT = TypeVar("ReportT", bound=Mapping[str, Any])

AttributeFiles = tuple[AttributeKind, dict[str, str]]
"""Kind of an attribute, and the paths of its files by field name of `cache.format.manifest.Attribute`."""


class BuildId(TypedDict):
    """Generation that a step works on."""

    generation: str


class BegunBuild(BuildId):
    """Result of `begin`: ids and addresses only. `nothing_newer`: reason why the live generation stays."""

    url: str
    shards: list[int]
    already_live: bool
    nothing_newer: NotRequired[str]


class FileEntry(TypedDict):
    """File of a generation: the fields of an `Artefact`."""

    path: str
    size_bytes: int
    sha256: str


def file_entry(artefact: Artefact) -> FileEntry:
    """Return the entry of a file; `Artefact(**entry)` converts it back."""
    return FileEntry(path=artefact.path, size_bytes=artefact.size_bytes, sha256=artefact.sha256)


class PagesEntry(TypedDict):
    """Pages of a table, or of one shard's part of it: the number of records, and the files of pages and checksums."""

    count: int
    file: FileEntry
    sums: FileEntry


class FacetEntry(TypedDict):
    """Facet: the hash seed and directory of its values, and its table."""

    seed: int
    directory: FileEntry
    table: PagesEntry


class FacetFields(TypedDict, total=False):
    """Field of `begin` or `embed_items`, whichever writes the tables by scores; missing without facets."""

    facets: dict[str, FacetEntry]


class PriorEntry(TypedDict):
    """Base of a night, None without one, and the reason why not all of it can be copied."""

    generation: str | None
    has_lists: bool
    why: str


class BaseEntry(PriorEntry):
    """Base of a night; `read_because`: reason why its partition was not copied."""

    took_over: bool
    read_because: str


NO_BASE_ENTRY: Final = BaseEntry(generation=None, has_lists=False, why="", took_over=False, read_because="")
"""Base of a night that a release without copies began: its report has no base."""


class KeptFile(TypedDict):
    """File of a partition that a later night may copy."""

    size_bytes: int
    sha256: str


class InputFields(TypedDict):
    """Fields of `begin` that are known before sources are read."""

    inputs_digest: str
    inputs: list[InputEntry]
    bundle_digest: str
    erased: list[int]
    settings: str
    cut: str | None


class EventValueFields(TypedDict):
    """Field of `begin`: digest of the values that events set."""

    user_values: str


class ItemFields(CatalogueFields):
    """Fields of `begin` on items."""

    unlisted_items: int


class AttributeFields(TypedDict):
    """Field of `begin`: attributes of items by name."""

    attributes: dict[str, AttributeFiles]


class UserFields(TypedDict):
    """Fields of `begin` on users and their interactions.

    `late`: number of interactions that the cut left out; `oldest_late_us`: time of the oldest of them in microseconds
    since 1970, None without one.
    """

    user_seed: int
    users: int
    featured: int
    featured_users: bool
    answers_without_history: bool
    interactions: int
    unknown_items: int
    late: int
    oldest_late_us: NotRequired[int | None]
    unusable: UnusableReport
    base: BaseEntry
    rows: RowCountsReport


class RemarkFields(TypedDict):
    """Fields of `begin`: remarks, and items of interactions that are missing from the catalogue, if they are many."""

    remarks: list[str]
    unknown_items_named: NotRequired[list[str]]


class FileFields(TypedDict):
    """Fields of `begin` on files for other steps, and for later nights."""

    user_vectors: bool
    bundle_files: list[str]
    kept: dict[str, KeptFile]


class BeginReport(
    InputFields, EventFields, EventValueFields, ItemFields, AttributeFields, UserFields, RemarkFields, FacetFields,
    FileFields,
):  # fmt: skip
    """Report of `begin`."""

    seconds: float


class EmbedItemsReport(FacetFields):
    """Report and result of `embed_items`; `regrouped`: models whose output for a row does not depend on the batch."""

    items: int
    dims: int
    seconds: float
    computed_by: str
    regrouped: Mapping[str, bool]
    changes: bool
    base: str | None
    copied: int


class UserScores(TypedDict):
    """Users of a scored shard. `reasons`: users by the reason to copy or compute them, None without a base."""

    entities: int
    scored: int
    without_input: int
    short: int
    unusable: UnusableReport
    seconds: dict[str, float]
    reasons: dict[str, int] | None
    directory: FileEntry
    inputs: FileEntry
    seen: list[FileEntry]
    tables: dict[str, PagesEntry]


class ItemScores(TypedDict):
    """Items of a scored shard."""

    scored: int
    copied: int
    seconds: dict[str, float]
    tables: dict[str, PagesEntry]
    unusable: UnusableReport


class ShardReport(TypedDict):
    """Report of `score` on one shard; `began_at` and `ended_at` are Unix seconds."""

    shard: int
    users: UserScores
    items: ItemScores
    computed_by: str
    began_at: float
    ended_at: float


class AssembleReport(TypedDict):
    """Report of `assemble`."""

    users_scored: int


class IndexEntry(TypedDict):
    """FAISS index of one metric, with its recall."""

    metric: Metric
    kind: str
    file: FileEntry
    recall: float


class IndexReport(TypedDict):
    """Report and result of `index`."""

    indexes: dict[str, IndexEntry]
    seconds: float


class ModelEntry(TypedDict):
    """Live model: the fields of a `cache.format.manifest.Model`."""

    name: str
    fp32: FileEntry
    int8: FileEntry | None
    digest: str
    spec: Mapping[str, Any]
    agreement: Mapping[str, Any]
    weights: FileEntry | None


class SampleFields(TypedDict, total=False):
    """Fields of `quantize` from its samples of users."""

    probe: FileEntry | None


class QuantizeReport(SampleFields):
    """Report and result of `quantize`."""

    models: dict[str, ModelEntry]
    seconds: float


class LoadReport(TypedDict):
    """Report of `load`."""

    seconds: float


class ReportName(str, Generic[ReportT]):
    """Name of a report in the store, `work/<name>.json` of its generation, with the type of the report."""


BEGIN_REPORT: Final = ReportName[BeginReport]("begin")
EMBED_ITEMS_REPORT: Final = ReportName[EmbedItemsReport]("embed_items")
ASSEMBLE_REPORT: Final = ReportName[AssembleReport]("assemble")
INDEX_REPORT: Final = ReportName[IndexReport]("index")
QUANTIZE_REPORT: Final = ReportName[QuantizeReport]("quantize")
LOAD_REPORT: Final = ReportName[LoadReport]("load")
VERIFY_REPORT: Final = ReportName[VerifyReport]("verified")


def shard_report_name(shard: int) -> ReportName[ShardReport]:
    """Return the name of a scored shard's report."""
    return ReportName(f"shard-{shard:04d}")
