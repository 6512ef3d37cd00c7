"""A request for one plain id on the fast way."""

from typing import NamedTuple

from cache.filters.masks import FilterMask
from cache.format.manifest import Table
from cache.tiers.tiered import RecordKey
from serving.generations.served_set import ServedGenerations
from serving.lookup.entity import PendingAnswer, build_plain_pending
from serving.requests.fast_parse import ParsedLookup
from serving.requests.models import RequestedEntity, RequestOptions


class SingleRequest(NamedTuple):
    """Parsed request: `served` is what it captured, `record_key` the night's record of the id, `started` monotonic."""

    served: ServedGenerations
    table: Table
    lookup: ParsedLookup
    record_key: RecordKey
    options: RequestOptions
    started: float
    request: bytes
    """Path and query, by which a ready answer is kept."""
    is_plain: bool
    """True if a record of the night may answer it."""
    filter_mask: FilterMask | None = None
    """Items that pass its filter; None without one."""
    events: bytes | None = None
    """Events in memory of a user with this id when it came, as they were kept."""

    @property
    def k(self) -> int:
        """Items of the list: as many as asked for, else the table's width."""
        return self.table.layout.width if self.options.k is None else self.options.k

    @property
    def pending_answer(self) -> PendingAnswer:
        """The request as the ladder has it."""
        single_lookup = self.lookup
        entity = RequestedEntity(single_lookup.table, single_lookup.id, single_lookup.raw, "id")
        return build_plain_pending(self.served.live, self.table, self.k, self.record_key, entity)
