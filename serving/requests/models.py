"""Requests as immutable values. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from cache.format.ids import FeatureValue
from serving.requests.options import RequestedArm, RequestOptions


@dataclass(frozen=True, slots=True)
class RequestedEntity:
    """Entity of a request; `field_path` is its path in the request, for messages."""

    table: str
    id: str | None
    raw_id: bytes | None
    field_path: str
    history: tuple[bytes, ...] | None = None
    features: Mapping[str, FeatureValue] | None = None

    @property
    def has_input(self) -> bool:
        """True if the caller sent anything to compute from."""
        return bool(self.history) or bool(self.features)

    def with_table(self, table: str) -> Self:
        """Return a copy of the entity for another table."""
        return replace(self, table=table)


@dataclass(frozen=True, slots=True)
class FeedbackReport:
    """Feedback: `event_count` events for a generation, a canary key or an arm; the other two are None."""

    generation: str | None
    canary_key: bytes | None
    arm: RequestedArm | None
    event_name: str
    event_count: int


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Lookup request: entities and the options for all of them."""

    entities: tuple[RequestedEntity, ...]
    options: RequestOptions


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score request: a user and the candidates to rank."""

    user: RequestedEntity
    candidate_ids: tuple[bytes, ...]
    options: RequestOptions

    def with_options(self, options: RequestOptions) -> Self:
        """Return a copy of the request with other options."""
        return replace(self, options=options)
