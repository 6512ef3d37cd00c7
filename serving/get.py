"""One request for one plain id on the hot route."""

from typing import NamedTuple

from cache.manifest import Table
from cache.tiered import Want
from serving.ask import Options
from serving.holding import Holding
from serving.plan import Single


class Get(NamedTuple):
    """`holding` is what it captured, `want` what the night has for the id, `started` monotonic."""

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
        """Items of the list."""
        return self.table.layout.width if self.options.k is None else self.options.k
