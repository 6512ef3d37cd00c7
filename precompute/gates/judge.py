"""Gates: what a generation must prove before it may be published. A gate that cannot answer says no."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import redis

from cache.errors import LarderError, Refused
from cache.servers import another
from precompute.gates.candidate import Candidate, Gate
from precompute.gates.entities import (
    coverage_of_live,
    coverage_of_source,
    directories_sorted,
    items_of_live,
    known_ids,
    record_ids,
)
from precompute.gates.exact import exact_lists, exact_numbers, history_in_lists, item_vectors
from precompute.gates.future import heldout_recall
from precompute.gates.host import disk_headroom, memory_headroom
from precompute.gates.in_redis import maxmemory_policy, pages_in_redis, redis_headroom
from precompute.gates.index import index_recall, index_vectors
from precompute.gates.live import (
    distinct_lists,
    list_jaccard,
    score_psi,
    single_item,
    stale_lists,
    top_items,
    top_items_of_live,
)
from precompute.gates.models import (
    bundle,
    defaults,
    dimension,
    int8_agreement,
    int8_cosine,
    int8_overlap,
    vocabulary,
)
from precompute.gates.records import (
    empty_lists,
    finite,
    lists_whole,
    page_sums,
    record_headers,
    short_lists,
)
from precompute.gates.skew import skew, skew_cosine
from precompute.gates.tables import tables_of_live
from precompute.gates.verdict import Verdict
from precompute.releases.control import Control

__all__ = ["GATES", "INTEGRITY", "Candidate", "Verdict", "demand_overridable", "run_gates"]

_INTEGRITY: Final[tuple[Gate, ...]] = (
    maxmemory_policy,
    redis_headroom,
    disk_headroom,
    memory_headroom,
    directories_sorted,
    bundle,
    dimension,
    vocabulary,
    known_ids,
    page_sums,
    record_headers,
    record_ids,
    finite,
    lists_whole,
    defaults,
    pages_in_redis,
    item_vectors,
    index_vectors,
    exact_lists,
    exact_numbers,
    history_in_lists,
)

_JUDGEMENT: Final[tuple[Gate, ...]] = (
    coverage_of_source,
    coverage_of_live,
    items_of_live,
    tables_of_live,
    empty_lists,
    short_lists,
    index_recall,
    int8_agreement,
    int8_overlap,
    int8_cosine,
    skew,
    skew_cosine,
    top_items,
    single_item,
    distinct_lists,
    top_items_of_live,
    score_psi,
    list_jaccard,
    stale_lists,
    heldout_recall,
)

GATES: Final = _INTEGRITY + _JUDGEMENT

LIVE_FILES: Final = "live_files"
"""The rule that the live generation's own manifest is there to be compared with."""

INTEGRITY: Final = frozenset(gate.__name__ for gate in _INTEGRITY) | {"files", "opens"}
"""Rules on what is simply wrong: nobody may wave it through."""

OVERRIDABLE: Final = frozenset(gate.__name__ for gate in _JUDGEMENT) | {LIVE_FILES}
"""Rules on what is unusual: a person may know why it is right."""


def demand_overridable(rule: str) -> None:
    """Raises Refused for a rule that protects integrity, or that is none."""
    if rule in INTEGRITY:
        raise Refused(
            f"{rule} protects integrity and cannot be overridden: repair the generation", rule=rule
        )
    if rule not in OVERRIDABLE:
        raise Refused(
            f"there is no rule {rule!r}; known are {', '.join(sorted(OVERRIDABLE))}", rule=rule
        )


def overridden(verdicts: Sequence[Verdict], reasons: Mapping[str, str]) -> list[Verdict]:
    """The verdicts, failures that may be and were overridden let pass with the reason."""
    return [
        replace(each, passed=True, overridden=reasons[each.rule])
        if not each.passed and each.rule in reasons and each.rule in OVERRIDABLE
        else each
        for each in verdicts
    ]


def run_gates(
    candidate: Candidate,
    gates: Sequence[Gate] = GATES,
    *,
    total_timeout_s: float | None = None,
    timer: Callable[[], float] = time.monotonic,
) -> Iterator[Verdict]:
    """Every gate's verdict; one that raises, outlasts `timeout_s`, or what is left of the time for all, has failed."""
    thresholds, started = candidate.thresholds, timer()
    total_s = thresholds.total_timeout_s if total_timeout_s is None else total_timeout_s
    for gate in gates:
        left_s = total_s - (timer() - started)
        yield run_gate(gate, candidate, min(thresholds.timeout_s, left_s))


def run_gate(gate: Gate, candidate: Candidate, timeout_s: float) -> Verdict:
    """One gate's verdict. It has a Redis connection of its own, of which nothing is left when its time is over."""
    leash = _Leash()
    client = another(candidate.control.client, partial(_OwnPool, leash))
    own = replace(candidate, control=Control(client, candidate.control.keys))
    try:
        return run_within(gate.__name__, lambda: gate(own), timeout_s)
    finally:
        leash.end()


def run_within(rule: str, judge: Callable[[], Verdict], timeout_s: float) -> Verdict:
    """The verdict of `judge`, or one that failed under this rule when it raises or its time is over."""
    if timeout_s <= 0:
        return Verdict(rule, False, "not run", "in time", "the time for all gates was over")
    answered: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    # A daemon, not a pool: the program's exit would wait for a pool's thread, and so for a gate that hangs.
    thread = threading.Thread(
        target=lambda: answered.put(_judge(rule, judge)), name=f"gate-{rule}", daemon=True
    )
    thread.start()
    try:
        return answered.get(timeout=timeout_s)
    except queue.Empty:
        return Verdict(rule, False, "timed out", round(timeout_s, 3), "seconds")


class _Leash:
    """All connections of one gate; once it is over there are none, however long its thread goes on."""

    def __init__(self) -> None:
        self.is_over = False
        self.pools: list[_OwnPool] = []

    def end(self) -> None:
        """Close what is open and open nothing more."""
        self.is_over = True
        for pool in tuple(self.pools):
            pool.disconnect(inuse_connections=True)


class _OwnPool(redis.ConnectionPool):
    """Connections of one gate to one server."""

    def __init__(self, leash: _Leash, **settings: Any) -> None:
        self._leash = leash
        super().__init__(**settings)
        leash.pools.append(self)

    def get_connection(self, *arguments: Any, **named: Any) -> Any:
        """Raises ConnectionError once the gate's time is over."""
        self._demand_time(None)
        return super().get_connection(*arguments, **named)

    def make_connection(self) -> Any:
        """A connection that does not come back by itself once the gate's time is over."""
        connection = super().make_connection()
        connection.register_connect_callback(self._demand_time)  # type: ignore[no-untyped-call]
        return connection

    def _demand_time(self, connection: Any) -> None:
        if self._leash.is_over:
            if connection is not None:
                connection.disconnect()
            raise redis.exceptions.ConnectionError("the gate's time is over")


def _judge(rule: str, judge: Callable[[], Verdict]) -> Verdict:
    try:
        return judge()
    except LarderError as error:
        return Verdict(rule, False, error.code, None, error.message)
    except Exception as error:
        return Verdict(rule, False, type(error).__name__, None, str(error))
