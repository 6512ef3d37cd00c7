"""Observer of the request path's answers, and nothing more: judging comes later, elsewhere."""

from collections.abc import Sequence

from cache.tiers.eviction_history import EvictionHistory
from cache.tiers.results import NOWHERE, MissReason
from serving.metrics.miss_reasons import L1Misses
from serving.usage.answer_sampling import AnswerSampler
from serving.usage.hot_keys import RecentNames
from serving.usage.read_counts import ReadHashes


class UsageObserver:
    """Observer for the event loop of one process only. `cold`: ids asked for that the night did not know."""

    def __init__(
        self,
        l1_misses: L1Misses,
        absences: EvictionHistory | None = None,
        sampler: AnswerSampler | None = None,
    ) -> None:
        self.cold = RecentNames()
        self.reads = ReadHashes()
        self.sampler = AnswerSampler(0) if sampler is None else sampler
        self._l1_misses = l1_misses
        self._eviction_history = absences or EvictionHistory(slots=2)

    def classify_miss(
        self, generation: str, table: str, key: int | bytes, reason: str | None
    ) -> str:
        """The reason by which a miss is counted: an id that the night lacks may have had a live answer for its life."""
        if reason in NOWHERE and self._eviction_history.is_over(generation, table, key):
            return MissReason.EXPIRED
        return reason or MissReason.INTERNAL_ERROR

    def read(self, generation: str, table: str, key: int | bytes, is_known: bool = True) -> None:
        """Counts one entity that Redis answered, so L1 did not; `is_known` to the night."""
        self._l1_misses.add(table, {self._eviction_history.find_reason(generation, table, key): 1})
        if is_known:
            self.reads.add(generation, table, (key,))

    def read_many(self, generation: str, table: str, keys: Sequence[int | bytes]) -> None:
        """Counts entities that Redis answered, so L1 did not; the night knows them all."""
        self._l1_misses.add(table, self._eviction_history.count(generation, table, keys))
        self.reads.add(generation, table, keys)
