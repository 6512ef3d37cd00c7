"""Gates: what a generation must prove before it may be published. A gate that cannot answer says no."""

import queue
import threading
from collections.abc import Sequence

from cache.errors import LarderError
from precompute.gate_rules import (
    coverage_of_live,
    coverage_of_source,
    directories_sorted,
    index_recall,
    int8_agreement,
    items_of_live,
    maxmemory_policy,
    pages_in_redis,
    short_lists,
)
from precompute.skew import skew
from precompute.verdict import Candidate, Gate, Verdict

__all__ = ["GATES", "Candidate", "Verdict", "run_gates"]

GATES: tuple[Gate, ...] = (
    maxmemory_policy,
    directories_sorted,
    coverage_of_source,
    coverage_of_live,
    items_of_live,
    short_lists,
    index_recall,
    int8_agreement,
    pages_in_redis,
    skew,
)


def run_gates(candidate: Candidate, gates: Sequence[Gate] = GATES) -> list[Verdict]:
    """Every gate's verdict; one that raises or outlasts `timeout_s` has failed."""
    return [_run(gate, candidate) for gate in gates]


def _run(gate: Gate, candidate: Candidate) -> Verdict:
    answered: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    # A daemon, not a pool: the program's exit would wait for a pool's thread, and so for a gate that hangs.
    thread = threading.Thread(
        target=lambda: answered.put(_judge(gate, candidate)),
        name=f"gate-{gate.__name__}",
        daemon=True,
    )
    thread.start()
    try:
        return answered.get(timeout=candidate.thresholds.timeout_s)
    except queue.Empty:
        return Verdict(gate.__name__, False, "timed out", candidate.thresholds.timeout_s)


def _judge(gate: Gate, candidate: Candidate) -> Verdict:
    name = gate.__name__
    try:
        return gate(candidate)
    except LarderError as error:
        return Verdict(name, False, error.code, None, error.message)
    except Exception as error:
        return Verdict(name, False, type(error).__name__, None, str(error))
