"""A request for one plain id on the hot route."""

from typing import NamedTuple

from cache.format.manifest import Table
from cache.tiers.tiered import Want
from serving.generations.served_set import Holding
from serving.requests.fast_parse import Single
from serving.requests.models import Options


class Get(NamedTuple):
    """A parsed request: `holding` is what it captured, `want` what the night has for the id, `started` monotonic."""

    holding: Holding
    table: Table
    asked: Single
    want: Want
    options: Options
    started: float
    request: bytes
    """Path and query, by which a ready answer is kept."""

    @property
    def k(self) -> int:
        """Items of the list: as many as asked for, else the table's width."""
        return self.table.layout.width if self.options.k is None else self.options.k
