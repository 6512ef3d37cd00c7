"""The words for misses, and the count of those that Redis made good."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from cache.tiers.eviction_history import Absence

WORDS: Mapping[str, str] = {
    "negative": "not_in_generation",
    "overlay_unread": "not_in_generation",
    "l2_timeout": "deadline",
    "breaker_open": "l2_down",
}
"""Counted reason by the one that an answer tells in more detail; all other reasons are counted as they are told."""

EXHAUSTED = "exhausted"
"""Reason: too little of a list is left without what the caller has seen or excluded."""

NOWHERE = frozenset({"not_in_generation", "negative", "overlay_unread"})

REASONS = (
    "not_in_generation", "expired", "page_missing", "corrupt", "l2_down", "deadline",
    "input_changed", "fresh", "too_old", EXHAUSTED, "entity_blocked", "internal_error",
)  # fmt: skip
"""Reasons that no stored tier answered: nothing there or readable; then what the caller wanted; then a defect."""


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
