"""How gates are run: what raises, hangs or lacks its input has failed, and reaches Redis no more."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from cache.errors import ConfigError, Refused
from cache.keys import Keyspace
from precompute.config import GateThresholds
from precompute.gates.candidate import Candidate
from precompute.gates.evidence import Evidence
from precompute.gates.judge import (
    GATES,
    INTEGRITY,
    OVERRIDABLE,
    demand_overridable,
    overridden,
    run_gate,
    run_gates,
    run_within,
)
from precompute.gates.verdict import Verdict, at_least, at_most, none_of, worst_of
from precompute.releases.control import Control
from precompute.verifying import reason

GENERATION = "20260131T000000Z-0123456789ab"


@pytest.fixture
def candidate(redis_url: str, keyspace: Keyspace) -> Candidate:
    nothing = cast(Any, None)
    control = Control(redis.Redis.from_url(redis_url, protocol=3), keyspace)
    return Candidate(
        nothing,
        Path(),
        nothing,
        control,
        None,
        GateThresholds(),
        10,
        given=cast(Evidence, object()),
    )


def passes(_candidate: Candidate) -> Verdict:
    return Verdict("passes", True, 1, 1)


def test_a_gate_that_hangs_can_no_longer_use_redis(
    candidate: Candidate, keyspace: Keyspace
) -> None:
    over, done = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def hangs(seen: Candidate) -> Verdict:
        seen.control.client.set(keyspace.live, "before")
        over.wait(30)
        try:
            seen.control.client.set(keyspace.live, "after")
        except Exception as error:
            errors.append(error)
        done.set()
        return passes(seen)

    verdict = run_gate(hangs, candidate, 0.2)
    over.set()

    assert not verdict.passed and verdict.value == "timed out" and verdict.rule == "hangs"
    assert done.wait(30) and isinstance(errors[0], redis.exceptions.ConnectionError)
    assert candidate.control.client.get(keyspace.live) == b"before"


def test_a_gate_that_waits_for_redis_itself_is_cut_off(
    candidate: Candidate, keyspace: Keyspace
) -> None:
    done = threading.Event()
    errors: list[Exception] = []

    def blocks(seen: Candidate) -> Verdict:
        try:
            seen.control.client.blpop([keyspace.next], timeout=20)
            seen.control.client.set(keyspace.live, "after")
        except Exception as error:
            errors.append(error)
        done.set()
        return passes(seen)

    assert not run_gate(blocks, candidate, 0.2).passed
    candidate.control.client.rpush(keyspace.next, "x")

    assert done.wait(30) and errors
    assert candidate.control.client.get(keyspace.live) is None


def test_one_gate_does_not_end_the_connection_of_the_next(candidate: Candidate) -> None:
    def asks(seen: Candidate) -> Verdict:
        return Verdict("asks", bool(seen.control.client.ping()), 1, 1)

    assert [each.passed for each in run_gates(candidate, [asks, passes, asks])] == [True] * 3


def test_the_time_for_all_gates_is_bounded(candidate: Candidate) -> None:
    seconds = iter([0.0, 0.0, 11.0, 11.0])
    bounded = replace(candidate, thresholds=GateThresholds(total_timeout_s=10.0))

    verdicts = list(run_gates(bounded, [passes, passes], timer=lambda: next(seconds)))

    assert [each.passed for each in verdicts] == [True, False]
    assert verdicts[1].rule == "passes" and verdicts[1].value == "not run"


def test_what_raises_has_failed_under_its_own_rule() -> None:
    def raises() -> Verdict:
        raise KeyError("users_scored")

    verdict = run_within("coverage", raises, 5.0)

    assert (verdict.rule, verdict.passed, verdict.value) == ("coverage", False, "KeyError")
    assert "users_scored" in verdict.note


def test_every_gate_is_either_of_integrity_or_may_be_overridden() -> None:
    names = {gate.__name__ for gate in GATES}
    assert names == (INTEGRITY | OVERRIDABLE) - {"files", "opens", "live_files"}
    assert not INTEGRITY & OVERRIDABLE and len(names) == len(GATES)


def test_an_override_lifts_a_judgement_and_never_integrity() -> None:
    found = [
        Verdict("score_psi", False, 3.0, 0.25), Verdict("finite", False, 1, 0),
        Verdict("list_jaccard", False, 0.1, 0.4),
    ]  # fmt: skip

    after = overridden(found, {"score_psi": "a new scale", "finite": "who cares"})

    assert [each.passed for each in after] == [True, False, False]
    assert after[0].to_json()["overridden"] == "a new scale"
    assert "overridden" not in after[1].to_json()


@pytest.mark.parametrize("rule", ["finite", "files", "maxmemory_policy", "dimension"])
def test_integrity_cannot_be_overridden_and_says_so(rule: str) -> None:
    with pytest.raises(Refused, match="cannot be overridden"):
        demand_overridable(rule)


def test_an_unknown_rule_is_told_with_those_there_are() -> None:
    with pytest.raises(Refused, match=r"no rule 'churn'.*list_jaccard"):
        demand_overridable("churn")
    demand_overridable("list_jaccard")


def test_a_refusal_names_rule_value_threshold_and_the_command() -> None:
    said = reason(GENERATION, Verdict("list_jaccard", False, 0.1, 0.4, "user_topk", "live-one"))

    assert "list_jaccard is 0.1, the threshold 0.4 (compared with live-one) user_topk" in said
    assert f'python -m precompute override {GENERATION} --rule list_jaccard --reason "..."' in said
    assert "cannot be overridden" in reason(GENERATION, Verdict("finite", False, 2, 0))


def test_what_is_not_a_number_fails_every_threshold() -> None:
    nan = float("nan")
    assert not at_least("r", nan, 0.0).passed and not at_most("r", nan, 9.0).passed
    assert worst_of([0.5, nan, 0.1]) != worst_of([0.5, 0.1]) == 0.1
    assert none_of("r", 0, "never shown").note == ""


def test_thresholds_are_numbers_that_are_not_negative() -> None:
    for wrong in ({"score_psi": -0.1}, {"timeout_s": 0.0}, {"total_timeout_s": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            GateThresholds(**wrong)
