"""Judge: runs every gate within its time limit, on its own connections, and interprets its errors.

An error of Larder's own, or a missing file, is a finding: the gate has failed. A dependency that did not answer, and
any other error, is none (`NotJudged`): a defect of a gate, or damage that only this gate meets, refuses nothing by
itself. Neither lets a generation pass, and the verdicts of other gates count: `verify` refuses the generation after a
`GateRaised` if any verdict failed, and after another `NotJudged` if that of an integrity rule did.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import redis

from cache.config.night import GateThresholds, GovernorConfig
from cache.control.control_keys import Control
from cache.errors import LarderError, NotJudged, Refused, StoreError, TierUnavailable
from cache.format.manifest import Manifest
from cache.l2.sync_clients import clone_client
from precompute.builds.seal import WITHOUT_INTERACTIONS_FACT
from precompute.features import feature_gates
from precompute.gates.evidence.candidate import Candidate, Gate, Measurement, Verdict
from precompute.gates.rules.checksums import pages_in_redis
from precompute.gates.rules.exact import exact_lists, exact_numbers, history_in_lists, item_vectors
from precompute.gates.rules.headroom import disk_headroom, maxmemory_policy, memory_headroom, redis_headroom
from precompute.gates.rules.live import (
    distinct_lists,
    distinct_values,
    heldout_recall,
    list_jaccard,
    score_psi,
    single_item,
    stale_lists,
    tables_of_live,
    top_items,
    top_items_of_live,
    value_psi,
)
from precompute.gates.rules.models import (
    bundle,
    defaults,
    dimension,
    index_recall,
    index_vectors,
    int8_agreement,
    int8_cosine,
    int8_overlap,
    live_models,
    vocabulary,
)
from precompute.gates.rules.records import (
    coverage_of_live,
    coverage_of_source,
    directories_sorted,
    empty_lists,
    finite,
    items_of_live,
    known_ids,
    lists_whole,
    page_sums,
    record_headers,
    record_ids,
    short_lists,
    unknown_items,
    unusable_rows,
)
from precompute.gates.rules.skew import skew, skew_cosine

GATES: Final[tuple[Gate, ...]] = (
    maxmemory_policy,
    redis_headroom,
    disk_headroom,
    memory_headroom,
    directories_sorted,
    bundle,
    dimension,
    vocabulary,
    live_models,
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
    *feature_gates(),
    exact_lists,
    exact_numbers,
    history_in_lists,
    unusable_rows,
    unknown_items,
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
    distinct_values,
    top_items_of_live,
    score_psi,
    value_psi,
    list_jaccard,
    stale_lists,
    heldout_recall,
)
"""All rules that need an opened generation, those of features included, in the order in which they run."""

MIB: Final = 1 << 20
READ_PASSES: Final = 3
"""Number of passes over all bytes: files against their checksums, records one by one, pages in Redis."""

FILES_RULE: Final = "files"
"""Rule that every file is as the manifest states; without it no generation can be opened."""

OPENS_RULE: Final = "opens"
"""Rule that the generation can be opened."""

LIVE_FILES_RULE: Final = "live_files"
"""Rule that the live generation's manifest can be read, to compare with."""

INTEGRITY_RULES: Final = frozenset(gate.rule for gate in GATES if gate.is_integrity) | {FILES_RULE, OPENS_RULE}
"""Rules that detect invalid data, which cannot be overridden."""

UNANSWERED_ERRORS: Final = (
    redis.exceptions.RedisError,
    redis.exceptions.RedisClusterException,
    TierUnavailable,
    StoreError,
    OSError,
    MemoryError,
)
"""Errors of Redis, the store, a disk or this host when they do not answer; they say nothing about the generation."""

OVERRIDABLE_RULES: Final = frozenset(gate.rule for gate in GATES if not gate.is_integrity) | {LIVE_FILES_RULE}
"""Rules that detect unusual data, for which a person may know a reason."""

NO_ERROR_THRESHOLD: Final = "no error"
"""Threshold of a gate that failed by an error of Larder's own; the error's code is the value."""

_LARDER_PACKAGES: Final = ("cache", "precompute")
"""Packages whose code gates run."""


class GateRaised(NotJudged):
    """A gate raised an error that says nothing about the generation; later gates can still run."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Maximum seconds for one gate, and for all of them."""

    gate_s: float
    total_s: float

    @classmethod
    def of(cls, thresholds: GateThresholds, governor: GovernorConfig, size_bytes: int) -> Self:
        """Return limits for a generation of `size_bytes`, which include reading it at the governor's lowest rate."""
        reading_s = size_bytes / (governor.floor_mib_s * MIB)
        return cls(thresholds.timeout_s + reading_s, thresholds.total_timeout_s + READ_PASSES * reading_s)


def run_gates(
    candidate: Candidate,
    gates: Sequence[Gate] = GATES,
    *,
    limits: TimeLimits | None = None,
    monotonic_clock: Callable[[], float] = time.monotonic,
) -> Iterator[Verdict]:
    """Yield every gate's verdict; raise NotJudged at the first gate that has no answer or no time left.

    Raises GateRaised for the first gate with an error, after all others have run. The verdicts yielded before either
    error are valid, and the caller decides by them.
    """
    start_s = monotonic_clock()
    first_raised_error: GateRaised | None = None
    if limits is None:
        limits = TimeLimits(candidate.thresholds.timeout_s, candidate.thresholds.total_timeout_s)
    for gate in gates:
        remaining_s = limits.total_s - (monotonic_clock() - start_s)
        try:
            yield run_gate(gate, candidate, min(limits.gate_s, remaining_s))
        except GateRaised as error:
            first_raised_error = first_raised_error or error
    if first_raised_error is not None:
        raise first_raised_error


def run_gate(gate: Gate, candidate: Candidate, timeout_s: float) -> Verdict:
    """Return the verdict of one gate, run within its time limit, on Redis connections that end with it."""
    gate_connections = GateConnections()
    client = clone_client(candidate.control.client, partial(GateConnectionPool, gate_connections))
    gate_candidate = replace(candidate, control=Control(client, candidate.control.keyspace))
    try:
        return run_within(gate.rule, lambda: gate(gate_candidate), timeout_s)
    finally:
        gate_connections.end()


def run_within(rule: str, measure: Callable[[], Measurement], timeout_s: float) -> Verdict:
    """Return the verdict of `measure`, or a failed one under this rule if it raises one of Larder's own errors.

    Raises NotJudged after the time limit, or if a dependency did not answer; GateRaised for any other error.
    """
    if timeout_s <= 0:
        raise _not_judged(rule, "the time for all gates was over before this one")
    verdict_queue: queue.SimpleQueue[Verdict | NotJudged] = queue.SimpleQueue()
    # A daemon thread, not a pool: at exit the program would wait for a pool's thread, and so for a gate that hangs.
    thread = threading.Thread(target=lambda: verdict_queue.put(_judge(rule, measure)), name=f"gate-{rule}", daemon=True)
    thread.start()
    try:
        verdict_or_error = verdict_queue.get(timeout=timeout_s)
    except queue.Empty:
        raise _not_judged(rule, f"it timed out after {timeout_s:,.3g} seconds") from None
    if isinstance(verdict_or_error, NotJudged):
        raise verdict_or_error
    return verdict_or_error


def _judge(rule: str, measure: Callable[[], Measurement]) -> Verdict | NotJudged:
    try:
        return measure().to_verdict(rule)
    except NotJudged as error:
        return error
    except Exception as error:
        if is_unanswered(error):
            not_judged = _not_judged(rule, f"{type(error).__name__}: {error}")
            not_judged.__cause__ = error
            return not_judged
        if isinstance(error, LarderError):
            return Verdict(rule, False, error.code, NO_ERROR_THRESHOLD, error.message)
        if isinstance(error, FileNotFoundError):
            return Verdict(rule, False, type(error).__name__, NO_ERROR_THRESHOLD, str(error))
        gate_raised = GateRaised(
            f"{rule} could not be judged, so nothing is refused and nothing published: it raised "
            f"{type(error).__name__}: {error} ({_locate_error(error)}); run `larder verify` again. If the error is the "
            "same, the data that the gate reads are damaged, or the gate has a defect: begin the night again, and "
            "report this line",
            rule=rule,
        )
        gate_raised.__cause__ = error
        return gate_raised


def _locate_error(error: Exception) -> str:
    """Return the innermost line of Larder's own code in an error's traceback: module, line and function."""
    location = "nowhere"
    for frame in traceback.extract_tb(error.__traceback__):
        path_parts = Path(frame.filename).parts
        if package_indices := [index for index, part_name in enumerate(path_parts) if part_name in _LARDER_PACKAGES]:
            location = f"{'/'.join(path_parts[package_indices[-1] :])}, line {frame.lineno}, in {frame.name}"
    return location


def is_unanswered(error: BaseException | None) -> bool:
    """True if an error stems from a dependency that did not answer; a missing file counts as an answer."""
    has_unanswered = False
    while error is not None:
        if isinstance(error, FileNotFoundError):
            return False
        has_unanswered |= isinstance(error, UNANSWERED_ERRORS)
        error = error.__cause__
    return has_unanswered


def _not_judged(rule: str, reason: str) -> NotJudged:
    return NotJudged(
        f"{rule} could not be judged, so nothing is refused and nothing published: {reason}; "
        "run `larder verify` again after removing the cause",
        rule=rule,
    )


def applicable_gates(manifest: Manifest) -> tuple[Gate, ...]:
    """Return the gates that apply to a generation; without interactions, not those that compare answers with them."""
    if not manifest.facts.get(WITHOUT_INTERACTIONS_FACT):
        return GATES
    return tuple(gate for gate in GATES if not gate.wants_interactions)


def demand_overridable(rule: str) -> None:
    """Raise Refused for an integrity rule, or an unknown rule."""
    if rule in INTEGRITY_RULES:
        raise Refused(f"{rule} protects integrity and cannot be overridden: repair the generation", rule=rule)
    if rule not in OVERRIDABLE_RULES:
        raise Refused(f"there is no rule {rule!r}; known are {', '.join(sorted(OVERRIDABLE_RULES))}", rule=rule)


def apply_overrides(verdicts: Sequence[Verdict], override_reasons: Mapping[str, str]) -> list[Verdict]:
    """Return the verdicts; failures of overridable rules that were overridden pass, with the reason."""
    return [
        replace(verdict, passed=True, override_reason=override_reasons[verdict.rule])
        if not verdict.passed and verdict.rule in override_reasons and verdict.rule in OVERRIDABLE_RULES
        else verdict
        for verdict in verdicts
    ]


class GateConnections:
    """All connections of one gate; after its end none can be opened, even if its thread still runs."""

    def __init__(self) -> None:
        self.is_over = False
        self.pools: list[GateConnectionPool] = []

    def end(self) -> None:
        """Close all connections, and let no new one be opened."""
        self.is_over = True
        for pool in tuple(self.pools):
            pool.disconnect(inuse_connections=True)


class GateConnectionPool(redis.ConnectionPool):
    """Connections of one gate to one server."""

    def __init__(self, gate_connections: GateConnections, **settings: Any) -> None:
        self._gate_connections = gate_connections
        super().__init__(**settings)
        gate_connections.pools.append(self)

    def get_connection(self, *arguments: Any, **named: Any) -> Any:
        """Return a connection; raise ConnectionError after the gate's end."""
        self._demand_time_left(None)
        return super().get_connection(*arguments, **named)

    def make_connection(self) -> Any:
        """Make a connection that does not reconnect after the gate's end."""
        connection = super().make_connection()
        connection.register_connect_callback(self._demand_time_left)  # type: ignore[no-untyped-call]
        return connection

    def _demand_time_left(self, connection: Any) -> None:
        if self._gate_connections.is_over:
            if connection is not None:
                connection.disconnect()
            raise redis.exceptions.ConnectionError("the gate's time is over")
