"""How gates are run: what raises has failed, what hangs or could not ask is not judged, and reaches Redis no more."""

import errno
import re
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from cache.control.control_keys import Control
from cache.errors import ConfigError, CorruptArtefact, NotJudged, Refused, StoreError, TierUnavailable
from cache.format.redis_keys import Keyspace
from precompute.config.settings import GateThresholds, GovernorConfig
from precompute.gates import judge
from precompute.gates.evidence.candidate import (
    Candidate,
    Measurement,
    Verdict,
    at_least,
    at_most,
    integrity,
    none_of,
    worst_of,
)
from precompute.gates.evidence.evidence import Evidence
from precompute.gates.judge import (
    GATES,
    INTEGRITY_RULES,
    OVERRIDABLE_RULES,
    TimeLimits,
    applicable_gates,
    apply_overrides,
    demand_overridable,
    run_gate,
    run_gates,
    run_within,
)
from precompute.steps.verify import failure_reason

GENERATION = "20260131T000000Z-0123456789ab"


@pytest.fixture
def candidate(redis_url: str, keyspace: Keyspace) -> Candidate:
    placeholder = cast(Any, None)
    control = Control(redis.Redis.from_url(redis_url, protocol=3), keyspace)
    return Candidate(
        placeholder,
        Path(),
        placeholder,
        control,
        None,
        GateThresholds(),
        10,
        prepared_evidence=cast(Evidence, object()),
    )


@integrity("passes")
def passes(_candidate: Candidate) -> Measurement:
    return Measurement(True, 1, 1)


def test_a_gate_that_hangs_can_no_longer_use_redis(candidate: Candidate, keyspace: Keyspace) -> None:
    over, gate_finished = threading.Event(), threading.Event()
    errors: list[Exception] = []

    @integrity("hangs")
    def hangs(gate_candidate: Candidate) -> Measurement:
        gate_candidate.control.client.set(keyspace.live, "before")
        over.wait(30)
        try:
            gate_candidate.control.client.set(keyspace.live, "after")
        except Exception as error:
            errors.append(error)
        gate_finished.set()
        return passes(gate_candidate)

    with pytest.raises(NotJudged, match=r"hangs could not be judged.*timed out after 0\.2 s"):
        run_gate(hangs, candidate, 0.2)
    over.set()

    assert gate_finished.wait(30) and isinstance(errors[0], redis.exceptions.ConnectionError)
    assert candidate.control.client.get(keyspace.live) == b"before"


def test_a_gate_that_waits_for_redis_itself_is_cut_off(candidate: Candidate, keyspace: Keyspace) -> None:
    gate_finished = threading.Event()
    errors: list[Exception] = []

    @integrity("blocks")
    def blocks(gate_candidate: Candidate) -> Measurement:
        try:
            gate_candidate.control.client.blpop([keyspace.staging_note], timeout=20)
            gate_candidate.control.client.set(keyspace.live, "after")
        except Exception as error:
            errors.append(error)
        gate_finished.set()
        return passes(gate_candidate)

    with pytest.raises(NotJudged):
        run_gate(blocks, candidate, 0.2)
    candidate.control.client.rpush(keyspace.staging_note, "x")

    assert gate_finished.wait(30) and errors
    assert candidate.control.client.get(keyspace.live) is None


def test_one_gate_does_not_end_the_connection_of_the_next(candidate: Candidate) -> None:
    @integrity("asks")
    def asks(gate_candidate: Candidate) -> Measurement:
        return Measurement(bool(gate_candidate.control.client.ping()), 1, 1)

    assert [verdict.passed for verdict in run_gates(candidate, [asks, passes, asks])] == [True] * 3


def test_the_time_for_all_gates_is_bounded(candidate: Candidate) -> None:
    seconds = iter([0.0, 0.0, 11.0, 11.0])
    bounded = replace(candidate, thresholds=GateThresholds(total_timeout_s=10.0))

    verdicts = run_gates(bounded, [passes, passes], monotonic_clock=lambda: next(seconds))

    assert next(verdicts).passed
    with pytest.raises(NotJudged, match=r"passes could not be judged.*time for all gates"):
        next(verdicts)


GIB = 1 << 30


@pytest.mark.parametrize("size_bytes", [0, GIB, 170 * 10**9])
def test_what_is_read_at_the_governors_floor_is_read_in_time(size_bytes: int) -> None:
    """At 16 MiB/s 170 GB take three hours; 600 s were enough for 9.4 GiB."""
    thresholds, governor = GateThresholds(), GovernorConfig()
    at_the_floor_s = size_bytes / (governor.floor_mib_s * (1 << 20))

    limits = TimeLimits.of(thresholds, governor, size_bytes)

    assert limits.gate_s == thresholds.timeout_s + at_the_floor_s
    assert limits.total_s >= thresholds.total_timeout_s + 3 * at_the_floor_s


def test_gates_have_the_time_that_the_bytes_take(candidate: Candidate) -> None:
    seconds = iter([0.0, 0.0, 9_000.0, 9_000.0])
    limits = TimeLimits.of(candidate.thresholds, GovernorConfig(), 60 * GIB)

    verdicts = list(run_gates(candidate, [passes, passes], limits=limits, monotonic_clock=lambda: next(seconds)))

    assert all(verdict.passed for verdict in verdicts)


def test_a_gate_that_raises_refuses_nothing_and_says_where_it_raised() -> None:
    def raises() -> Measurement:
        raise KeyError("users_scored")

    with pytest.raises(NotJudged, match="coverage could not be judged, so nothing is refused") as caught:
        run_within("coverage", raises, 5.0)

    assert re.search(r"KeyError: 'users_scored' \(.*, line \d+, in raises\)", caught.value.message)


def test_where_a_gate_raised_is_the_innermost_line_of_our_own() -> None:
    with pytest.raises(judge.GateRaised, match=r"candidate\.py, line \d+, in at_least\)"):
        run_within("coverage", lambda: at_least("much", 0.5), 5.0)  # type: ignore[arg-type]


def test_gates_behind_one_that_raises_are_asked_all_the_same(candidate: Candidate) -> None:
    @integrity("broken")
    def broken(_candidate: Candidate) -> Measurement:
        raise IndexError("index 0 is out of bounds")

    @integrity("fails")
    def fails(_candidate: Candidate) -> Measurement:
        return Measurement(False, 1, 0)

    verdicts: list[Verdict] = []
    with pytest.raises(judge.GateRaised, match="broken could not be judged"):
        deque(map(verdicts.append, run_gates(candidate, [passes, broken, fails])))

    assert [verdict.rule for verdict in verdicts] == ["passes", "fails"]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ConnectionError("reset by peer"),
        redis.exceptions.TimeoutError("5 s"),
        redis.exceptions.OutOfMemoryError("used memory > maxmemory"),
        TierUnavailable("no answer"),
        StoreError("503 Slow Down"),
        OSError(errno.EIO, "input/output error"),
        MemoryError(),
        caused(CorruptArtefact("cannot be read"), OSError(errno.ESTALE, "stale file handle")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_could_not_be_asked_is_not_judged(error: Exception) -> None:
    def asks() -> Measurement:
        raise error

    with pytest.raises(NotJudged, match="coverage could not be judged") as caught:
        run_within("coverage", asks, 5.0)

    assert caught.value.__cause__ is error and caught.value.details == {"rule": "coverage"}


@pytest.mark.parametrize(
    "error",
    [
        CorruptArtefact("SHA-256"),
        FileNotFoundError("work/holdout.json"),
        caused(StoreError("items.bin is not in the store"), FileNotFoundError("items.bin")),
        Refused("allkeys-lru may evict pages"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_was_asked_and_is_wrong_or_missing_is_judged(error: Exception) -> None:
    def finds() -> Measurement:
        raise error

    verdict = run_within("coverage", finds, 5.0)

    assert not verdict.passed and verdict.threshold == "no error"
    assert verdict.rule == "coverage" and str(error) in verdict.note


def test_every_gate_is_either_of_integrity_or_may_be_overridden() -> None:
    names = {gate.rule for gate in GATES}
    assert names == (INTEGRITY_RULES | OVERRIDABLE_RULES) - {"files", "opens", "live_files"}
    assert not INTEGRITY_RULES & OVERRIDABLE_RULES and len(names) == len(GATES)


def test_an_override_lifts_a_judgement_and_never_integrity() -> None:
    verdicts = [
        Verdict("score_psi", False, 3.0, 0.25), Verdict("finite", False, 1, 0),
        Verdict("list_jaccard", False, 0.1, 0.4),
    ]  # fmt: skip

    after = apply_overrides(verdicts, {"score_psi": "a new scale", "finite": "who cares"})

    assert [verdict.passed for verdict in after] == [True, False, False]
    assert after[0].to_json()["overridden"] == "a new scale"
    assert "overridden" not in after[1].to_json()


@pytest.mark.parametrize("rule", ["finite", "files", "maxmemory_policy", "dimension"])
def test_integrity_cannot_be_overridden_and_says_so(rule: str) -> None:
    with pytest.raises(Refused, match="cannot be overridden"):
        demand_overridable(rule)


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match=r"no rule 'churn'.*list_jaccard"):
        demand_overridable("churn")
    demand_overridable("list_jaccard")


def test_a_refusal_names_rule_value_threshold_and_the_command() -> None:
    refusal_text = failure_reason(GENERATION, Verdict("list_jaccard", False, 0.1, 0.4, "user_topk", "live-one"))

    assert "list_jaccard is 0.1, the threshold 0.4 (compared with live-one) user_topk" in refusal_text
    assert f'larder override {GENERATION} --rule list_jaccard --reason "..."' in refusal_text
    assert "cannot be overridden" in failure_reason(GENERATION, Verdict("finite", False, 2, 0))


def test_what_is_not_a_number_fails_every_threshold() -> None:
    nan = float("nan")
    assert not at_least(nan, 0.0).passed and not at_most(nan, 9.0).passed
    assert worst_of({"a": 0.5, "b": nan, "c": 0.1})[0] == "b"
    assert worst_of({"a": 0.5, "c": 0.1}) == ("c", 0.1)
    assert none_of(0, "never shown").note == ""


def test_without_interactions_gates_that_ask_what_users_did_since_are_left_out() -> None:
    ordinary: Any = SimpleNamespace(facts={"interactions": 0})
    without: Any = SimpleNamespace(facts={"interactions": 0, "without_interactions": True})

    assert applicable_gates(ordinary) == GATES
    left_out = {gate.rule for gate in GATES} - {gate.rule for gate in applicable_gates(without)}
    assert left_out == {"stale_lists", "heldout_recall"} and not left_out & INTEGRITY_RULES


def test_thresholds_are_numbers_that_are_not_negative() -> None:
    for wrong in ({"score_psi": -0.1}, {"timeout_s": 0.0}, {"total_timeout_s": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            GateThresholds(**wrong)
