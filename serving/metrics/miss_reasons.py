"""The words for misses, and the count of those that Redis made good."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from cache.tiers.eviction_history import Absence
from cache.tiers.results import PUBLIC_BY_INTERNAL_REASON, REASONS_WITH_STORED_ANSWER, MissReason

REASONS = tuple(
    [
        reason
        for reason in MissReason
        if reason not in PUBLIC_BY_INTERNAL_REASON and reason not in REASONS_WITH_STORED_ANSWER
    ]
)
"""Reasons that are counted: no stored tier answered."""


class L1Misses(Collector):
    """Counter of entities that Redis answered, by why L1 did not: plain numbers, which only the event loop adds to."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, Absence], int] = defaultdict(int)

    def add(self, table: str, reasons: Mapping[Absence, int]) -> None:
        """Adds entities of a table, each counted under its one reason."""
        for reason, count in reasons.items():
            self._counts[table, reason] += count

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Counter family by table and reason."""
        family = CounterMetricFamily(
            "larder_l1_misses",
            "Entities Redis answered, by why L1 did not hold them",
            labels=["table", "reason"],
        )
        for (table, reason), count in self._counts.items():
            family.add_metric([table, reason], count)
        yield family
