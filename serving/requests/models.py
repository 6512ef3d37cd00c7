"""Requests of callers, as immutable values. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from cache.filters.expression import Filter
from cache.filters.reranking import Reranking
from cache.format.ids import FeatureValue


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the content of one request."""

    max_batch: int
    max_history: int
    max_exclude: int
    deadline_ms: float
    deadline_max_ms: float
    max_ids: int = 50_000
    max_numbers: int = 100_000
    boost_max: float = 4.0
    rerankings: Mapping[str, Reranking] = field(default_factory=dict)
    """Declared re-rankings, by name."""
    feature_text_bytes: int = 65_536

    @property
    def max_values(self) -> int:
        """Bound on the values of any kind in a JSON body: ids, numbers, entities, and a few others."""
        return self.max_ids + 2 * self.max_numbers + 8 * self.max_batch + 64


@dataclass(frozen=True, slots=True)
class RequestedEntity:
    """Entity of a request; `field` is its path in the request, for messages."""

    table: str
    id: str | None
    raw: bytes | None
    field: str
    history: tuple[bytes, ...] | None = None
    features: Mapping[str, FeatureValue] | None = None

    @property
    def has_input(self) -> bool:
        """True if the caller sent anything to compute from."""
        return bool(self.history) or bool(self.features)

    def of_table(self, table: str) -> Self:
        """Return a copy of the entity for another table."""
        return replace(self, table=table)


class RequestedArm(NamedTuple):
    """Arm of an experiment by which a tester wants to be answered."""

    experiment: str
    arm: str


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that apply to every entity of a request."""

    deadline_s: float
    k: int | None = None
    exclude: tuple[bytes, ...] = ()
    fresh: bool = False
    max_age_s: float | None = None
    generation: str | None = None
    canary_key: bytes | None = None
    filter: Filter | str | None = None
    """Filter that was sent, or the name of one that the generation declares."""
    rerank: Reranking | None = None
    arm: RequestedArm | None = None
    max_events: int | None = None
    """0: newer events are not counted; None: all are."""
    as_of: int | None = None
    """Number of the position up to which events are counted, for explanations; None: all are."""

    @property
    def is_reshaped(self) -> bool:
        """True if lists are filtered or re-ranked."""
        return self.filter is not None or self.rerank is not None


@dataclass(frozen=True, slots=True)
class FeedbackReport:
    """Feedback of a caller: `count` events, of answers of a generation, to a key, or of an arm; the others are None."""

    generation: str | None
    key: bytes | None
    arm: RequestedArm | None
    event: str
    count: int


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Lookup request: entities and the options for all of them."""

    entities: tuple[RequestedEntity, ...]
    options: RequestOptions


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score request: a user and the candidates to rank."""

    user: RequestedEntity
    items: tuple[bytes, ...]
    options: RequestOptions

    def with_options(self, options: RequestOptions) -> Self:
        """Return a copy of the request with other options."""
        return replace(self, options=options)
