"""A request for one plain id on the fast way."""

from typing import NamedTuple

from cache.filters.masks import Passing
from cache.format.manifest import Table
from cache.tiers.tiered import Want
from serving.generations.served_set import Holding
from serving.lookup.entity import Case, plain_case
from serving.requests.fast_parse import Single
from serving.requests.models import RequestedEntity, RequestOptions


class Get(NamedTuple):
    """A parsed request: `holding` is what it captured, `want` what the night has for the id, `started` monotonic."""

    holding: Holding
    table: Table
    asked: Single
    want: Want
    options: RequestOptions
    started: float
    request: bytes
    """Path and query, by which a ready answer is kept."""
    is_plain: bool
    """True if a record of the night may answer it."""
    passing: Passing | None = None
    """Items that pass its filter; None without one."""
    events: bytes | None = None
    """Events in memory of a user with this id when it came, as they were kept."""

    @property
    def k(self) -> int:
        """Items of the list: as many as asked for, else the table's width."""
        return self.table.layout.width if self.options.k is None else self.options.k

    @property
    def case(self) -> Case:
        """The request as the ladder has it."""
        single_lookup = self.asked
        entity = RequestedEntity(single_lookup.table, single_lookup.id, single_lookup.raw, "id")
        return plain_case(self.holding.live, self.table, self.k, self.want, entity)
