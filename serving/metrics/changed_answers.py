"""Counts of answers with newer events, and of how much of the lists is not in the night's."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ChangedAnswers(Collector):
    """Counter of answers by table, and summary of shares of lists: plain numbers, which only the event loop adds to."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self._lists: Counter[str] = Counter()
        self._share_sums: defaultdict[str, float] = defaultdict(float)

    def compare(
        self, table: str, items: NDArray[np.uint32], of_the_night: NDArray[np.uint32]
    ) -> None:
        """Adds the share of a computed list that is not in the one of the night."""
        if len(items):
            self._lists[table] += 1
            self._share_sums[table] += float(1.0 - np.isin(items, of_the_night).mean())

    def totals(self) -> tuple[int, int, float]:
        """Answers, lists that were compared, and the sum of their shares, of all tables."""
        return self.answers.total(), self._lists.total(), sum(self._share_sums.values())

    def collect(self) -> Iterable[Metric]:
        """Metric families by table."""
        answers = CounterMetricFamily(
            "larder_event_answers", "Entities answered with newer events", labels=["table"]
        )
        for table, count in self.answers.items():
            answers.add_metric([table], count)
        yield answers
        changes = SummaryMetricFamily(
            "larder_event_list_change_ratio",
            "Share of a list computed from newer events that is not in the night's, where L1 has that",
            labels=["table"],
        )
        for table, count in self._lists.items():
            changes.add_metric([table], count, self._share_sums[table])
        yield changes
