"""Counts of ready answers: noted in a list, and counted some at a time, which costs a third of one by one."""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter, itemgetter

import orjson

from cache.control.hot_keys import Name
from cache.tiers.l1 import ReadyAnswer
from serving.answers.sources import Source
from serving.lookup.service import LookupService
from serving.metrics.fast_counters import GET_ROUTE
from serving.usage.answer_sampling import AnswerSample

FLUSHED = 256
"""Answers that are counted together: what that costs by itself is paid this seldom."""
TIMED = 128
"""Answers per timed one, which stands for all of them."""

_get_table_and_id, _table, _is_newer = itemgetter(4), itemgetter(0), attrgetter("is_newer")


class SentAnswers(list[ReadyAnswer]):
    """Answers of the live generation in their order; `times`: how long those of them took that were timed, in seconds.

    Whoever appends the one that is `due` calls `flush_or_time`, whoever reads a count calls `flush` first. `time_next`
    hears when the next answer is to be timed.
    """

    def __init__(
        self,
        service: LookupService,
        clock: Callable[[], float],
        at_turn: Callable[[], None],
    ) -> None:
        super().__init__()
        self.times: list[float] = []
        self.time_next = at_turn
        self._clock = clock
        self._holder = service.follower.holder
        self._local = service.tiers.local
        self._recent, self._observes = service.ladder.recent, service.observes
        self._counters, self._trace = service.tiers.counters, service.tiers.trace
        self._tally, self._answer_seconds = service.metrics.tally, service.metrics.answer_seconds
        self._sampler = service.ladder.watch.sampler
        self._newer_event_answers = service.metrics.changed_answers.answers
        self._step = TIMED if self._observes else FLUSHED
        self.due = self._step
        self._recent.flush_pending = self._counters.flush = self.flush

    def flush_or_time(self) -> None:
        """Counts all answers if enough were sent, else has the next one timed; called when one is `due`."""
        if len(self) >= FLUSHED:
            self.flush()
        else:
            self.due += self._step
            self.time_next()

    def flush(self) -> None:
        """Counts all answers in the list, and begins anew."""
        if not self:
            return
        entity_names = list(map(_get_table_and_id, self))
        self._recent.extend(entity_names)
        if self._observes:
            self._count(entity_names)
        self.clear()
        self.times.clear()
        self.due = self._step
        self.time_next()

    def _count(self, entity_names: list[Name]) -> None:
        count = len(entity_names)
        self._counters.ready += count
        self._tally.requests[GET_ROUTE] += count
        times = self.times or [0.0]
        for at, seconds in enumerate(times):
            stands_for = count * (at + 1) // len(times) - count * at // len(times)
            self._answer_seconds.observe(Source.L1, seconds, stands_for)
        if any(map(_is_newer, self)):
            self._newer_event_answers.update(
                [
                    _table(ready_answer.table_and_id)
                    for ready_answer in self
                    if ready_answer.is_newer
                ]
            )
        tables = self._local.ready_tables
        count_by_table = (
            dict.fromkeys(tables, count) if len(tables) == 1 else Counter(map(_table, entity_names))
        )
        for name, answer_count in count_by_table.items():
            self._tally.answers[name, Source.L1] += answer_count
        sampler = self._sampler
        sampler.countdown -= count
        if sampler.countdown < 0:
            for index in sampler.draw_indices(count):
                if sampler.has_room():
                    self._sample(self[index])

    def touched(self, ready: ReadyAnswer) -> None:
        """Records that an answer of the sample is about to be sent."""
        trace_entry = ready.access
        if trace_entry is not None and trace_entry[0] <= self._trace.last:
            self._trace.append(trace_entry)
        else:  # since its answer was kept the sample shrank
            self._local.unsampled(ready)

    def _sample(self, ready: ReadyAnswer) -> None:
        """Samples an answer as it was sent, but with its age as of now; one from before a flip is passed over."""
        served, now_s = self._holder.served, self._clock()
        stamps = () if served is None else (served.live.stamp, served.live.values_stamp)
        if served is not None and ready.stamp in stamps and not ready.is_newer:
            age = orjson.dumps(round(now_s - ready.data_until, 3))
            body = b"".join((ready.head, age, ready.tail))
            self._sampler.put(
                AnswerSample(
                    served.live.generation,
                    *ready.table_and_id,
                    Source.L1,
                    "batch",
                    now_s,
                    body=body,
                )
            )
