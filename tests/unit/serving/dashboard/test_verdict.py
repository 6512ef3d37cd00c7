"""One sentence for each thing that can be wrong, and what to do about it."""

from typing import Any

import pytest

from serving.dashboard.document import build_verdict
from serving.requests.reasons import StaleReason

G1, G2 = "20261120T000000Z-000000000001", "20261119T000000Z-000000000002"


def replica(**changes: Any) -> dict[str, Any]:
    """One that is fine."""
    fine = {
        "replica": "a", "workers": 1, "generation": G1, "epoch": 1, "ready": True, "stale": None,
        "degraded": None, "seen_s": 0.1, "failed": None, "tokens_stale": None, "tls_stale": None,
        "store_problem": None, "canary_problem": None,
    }  # fmt: skip
    return fine | changes


def answers(hits: int = 0, live: int = 0, fallbacks: int = 0) -> dict[str, int]:
    return {"l1": hits, "l2": 0, "live": live, "previous": 0, "default": fallbacks}


def body(**changes: Any) -> dict[str, Any]:
    """A document in which all is well."""
    fine: dict[str, Any] = {
        "whole": True, "trouble": None, "replicas": [replica()],
        "lately": {"answers": answers(900, 80, 20), "misses": {"cold_start": 80, "evicted": 3}},
        "earlier": {"answers": answers(9_000, 800, 200)},
        "generations": [{"generation": G1, "state": "live", "gates": []}],
        "schedule": {"age_s": 3_600.0, "due_at": 0.0, "missing": False}, "nights": [],
        "redis": {"used_bytes": 50, "limit_bytes": 100, "policy": "volatile-lru"},
        "breakers": {"closed": 1, "half_open": 0, "open": 0},
        "queue": {"shed_lately": 0}, "events": None,
    }  # fmt: skip
    return fine | changes


def events(**changes: Any) -> dict[str, Any]:
    """Events that are taken in as they should be."""
    fine = {
        "up": True, "durability": "everysec", "demanded": "everysec", "writes_refused": None,
        "results": {"accepted": 950, "repeated": 50}, "refused": {}, "lag_s": 0.0,
        "held_bytes": 10, "held_max_bytes": 100, "stream_bytes": 79, "stream_max_bytes": 100, "inbox_lag_seconds": 0.5,
    }  # fmt: skip
    return fine | changes


def lately(**counts: int) -> dict[str, Any]:
    return {"answers": answers(**counts), "misses": {"cold_start": 80, "evicted": 3}}


def test_all_is_well() -> None:
    dashboard_verdict = build_verdict(body())

    assert (dashboard_verdict["level"], dashboard_verdict["advice"], dashboard_verdict["also"]) == ("ok", None, [])
    assert dashboard_verdict["sentence"] == (
        f"All is well: generation {G1} is live on 1 replica and 90.0% of the answers of the last "
        "minutes came from the cache."
    )


WRONG: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "redis away": (
        {"whole": False, "trouble": "connection refused"},
        "bad",
        "Redis cannot be reached (connection refused)",
        "larder restore",
    ),
    "breaker": (
        {"breakers": {"closed": 3, "half_open": 1, "open": 1}},
        "bad",
        "2 workers stopped using Redis",
        "SLOWLOG",
    ),
    "not ready": (
        {"replicas": [replica(), replica(replica="b", ready=False, failed="no room")]},
        "bad",
        "1 of 2 replicas not ready: no room",
        "log of b",
    ),
    "another store": (
        {
            "replicas": [
                replica(replica="b", ready=False, generation=None, failed=f"generation {G1} has no manifest in /x")
            ]
        },
        "bad",
        "has no manifest in /x",
        "b uses another artefact store: correct its LARDER_ARTIFACTS",
    ),
    "failed night": (
        {"nights": [{"generation": G1, "failure": {"step": "load", "at": 0.0, "error": "refused: Redis is full."}}]},
        "warn",
        f"in the step load ({G1}): refused: Redis is full; the live generation stays",
        "larder night again",
    ),
    "nothing published": (
        {"replicas": [replica(ready=False, generation=None)]},
        "bad",
        "1 of 1 replica not ready",
        "larder night",
    ),
    "missing": (
        {"schedule": {"age_s": 200_000.0, "due_at": 0.0, "missing": True}},
        "bad",
        "no generation: the served generation is 2.3 days old",
        "DAG",
    ),
    "stale": (
        {"replicas": [replica(stale="pointer_backwards")]},
        "warn",
        "may lag behind what was published: pointer_backwards",
        "restore",
    ),
    "blocklist unread": (
        {"replicas": [replica(stale="blocklist_unreadable")]},
        "warn",
        "may lag behind what was published: blocklist_unreadable",
        "repeat the blocks and erasures since the copy (larder block --list",
    ),
    "experiments unread": (
        {"replicas": [replica(stale="experiments_unreadable")]},
        "warn",
        "may lag behind what was published: experiments_unreadable",
        "log of a",
    ),
    "an emptied Redis": (
        {"replicas": [replica(stale="pointer_vanished")], "lately": lately(hits=500, fallbacks=500)},
        "bad",
        "Redis lost its pointer",
        "larder restore",
    ),
    "refused": (
        {"generations": [{"generation": G1, "state": "refused", "gates": [{"rule": "recall", "verdict": "failed"}]}]},
        "warn",
        "refused by recall",
        "override",
    ),
    "refused, of the live one's cut": (
        {
            "generations": [
                {"generation": G1, "state": "live", "gates": []},
                {"generation": f"{G1[:16]}-000000000000", "state": "refused", "gates": []},
            ]
        },
        "warn",
        "refused by a gate, the live generation stays",
        "override",
    ),
    "apart": ({"replicas": [replica(), replica(generation=G2)]}, "warn", f"2 generations: {G2}, {G1}", "restart"),
    "fallback": (
        {"lately": lately(hits=900, fallbacks=100)},
        "warn",
        "10.0% of the answers are from the previous generation or defaults (2.0% before), mostly because of cold_start",
        "miss reasons",
    ),
    "fallback, much": ({"lately": lately(hits=500, fallbacks=500)}, "bad", "50.0% of the answers", "live inference"),
    "fallback, pages lost": (
        {"lately": lately(hits=500, fallbacks=500) | {"misses": {"page_missing": 300, "cold_start": 80}}},
        "bad",
        "mostly because of page_missing",
        "Run larder restore",
    ),
    "hit rate": (
        {"lately": lately(hits=700, live=280, fallbacks=20)},
        "warn",
        "hit rate fell to 70.0% from 90.0%",
        "miss reasons",
    ),
    "degraded": ({"replicas": [replica(degraded="bad model")]}, "warn", "(bad model)", "roll-back"),
    "tokens not applied": (
        {"replicas": [replica(), replica(replica="b", tokens_stale="tokens file /t.json is not JSON: line 1")]},
        "bad",
        "Revoked tokens may still be valid on b, new ones are not: tokens file /t.json is not JSON: line 1.",
        "larder tokens list",
    ),
    "certificate not applied": (
        {"replicas": [replica(tls_stale="cannot read /tls.pem: No such file")]},
        "warn",
        "An earlier certificate, or one that is not valid now, is sent by a: cannot read /tls.pem: No such file.",
        "matching certificate and key",
    ),
    "store": (
        {
            "replicas": [
                replica(),
                replica(replica="b", store_problem="the artefact store /x lacks 2 of the files of g"),
            ]
        },
        "bad",
        "The artefact store has a problem, says b: the artefact store /x lacks 2 of the files of g.",
        "larder check",
    ),
    "canary": (
        {"replicas": [replica(canary_problem=f"{G2} cannot be loaded: no manifest"), replica(replica="b")]},
        "warn",
        f"The canary's share is answered from the live generation by a: {G2} cannot be loaded: no manifest.",
        "larder canary abandon",
    ),
    "memory": (
        {"redis": {"used_bytes": 93, "limit_bytes": 100, "policy": "volatile-lru"}},
        "warn",
        "Redis is 93% full",
        "maxmemory",
    ),
    "memory, much": (
        {"redis": {"used_bytes": 99, "limit_bytes": 100, "policy": "volatile-lru"}},
        "bad",
        "99% full",
        "maxmemory",
    ),
    "policy": (
        {"redis": {"used_bytes": 1, "limit_bytes": None, "policy": "allkeys-lru"}},
        "bad",
        "allkeys-lru",
        "volatile-lru",
    ),
    "events, not accepted": (
        {"events": events(up=False, durability="none")},
        "bad",
        "is less durable than demanded (found: none, demanded: everysec)",
        "larder check",
    ),
    "events, away after a good look": (
        {"events": events(up=False)},
        "bad",
        "No events are accepted: their Redis is unreachable.",
        "larder check",
    ),
    "events, away from the start": (
        {"events": events(up=False, durability=None)},
        "bad",
        "No events are accepted: their Redis is unreachable.",
        "larder check",
    ),
    "events, away where nothing is demanded": (
        {"events": events(up=False, durability="none", demanded="any")},
        "bad",
        "No events are accepted: their Redis is unreachable.",
        "larder check",
    ),
    "events, refused by a full disk": (
        {
            "events": events(
                up=False,
                writes_refused="the Redis of events answers, but refuses to write: it cannot write to its disk",
            )
        },
        "bad",
        "No events are accepted: their Redis answers, but refuses to write: it cannot write to its disk.",
        "larder check",
    ),
    "events, kept for less": (
        {"events": events(up=False, demanded="always")},
        "bad",
        "their Redis is less durable than demanded (found: everysec, demanded: always)",
        "larder check",
    ),
    "events, full": (
        {"events": events(refused={"events_full": 1}, stream_bytes=100)},
        "bad",
        "stream of events is full: events were refused 1 time in",
        "larder night",
    ),
    "events, filling": ({"events": events(stream_bytes=80)}, "warn", "stream of events is 80% full", "stream_bytes"),
    "events, behind": (
        {"events": events(lag_s=12.25, held_bytes=100), "replicas": [replica(), replica(stale="events_behind")]},
        "warn",
        "a worker is 12.2 s behind, its memory for events 100% full",
        "larder night",
    ),
    "events, in the inbox": (
        {"events": events(inbox_lag_seconds=61.0)},
        "warn",
        "waited in the inbox for 61 s",
        "XINFO CONSUMERS",
    ),
    "events, rejected": (
        {"events": events(results={"accepted": 945, "too_many": 20, "in_future": 35, "erased": 0})},
        "warn",
        "5.5% of the events were rejected, mostly as in_future",
        "correct the producers",
    ),
    "overload": ({"queue": {"shed_lately": 40}}, "warn", "40 inferences or requests were shed", "LARDER_WORKERS"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_its_remedy(name: str) -> None:
    changes, level, sentence, advice = WRONG[name]
    dashboard_verdict = build_verdict(body(**changes))

    assert dashboard_verdict["level"] == level
    assert sentence in dashboard_verdict["sentence"] and dashboard_verdict["sentence"].endswith(".")
    assert advice in dashboard_verdict["advice"]


STALE_ELSEWHERE = ("events_behind", "pointer_vanished", "redis_unreachable", "starting")
"""Reasons that have findings of their own, or end by themselves."""

STALE_BY_POINTER = ("pointer_backwards", "pointer_conflicting", "pointer_corrupt")


@pytest.mark.parametrize("reason", sorted(set(StaleReason) - set(STALE_ELSEWHERE)))
def test_a_restore_is_advised_only_where_it_helps(reason: str) -> None:
    advice = build_verdict(body(replicas=[replica(stale=reason)]))["advice"]

    assert ("rebuilds it from the records" in advice) == (reason in STALE_BY_POINTER)


QUIET: dict[str, dict[str, Any]] = {
    "few answers": {"lately": lately(fallbacks=199)},
    "no history": {"lately": lately(live=1_000), "earlier": {"answers": answers(hits=10)}},
    "always so": {"lately": lately(hits=500, fallbacks=500), "earlier": {"answers": answers(5_000, 0, 5_000)}},
    "better than before": {"lately": lately(hits=1_000)},
    "no limit": {"redis": {"used_bytes": 99, "limit_bytes": None, "policy": "volatile-lru"}},
    "unknown memory": {"redis": {"used_bytes": None, "limit_bytes": None, "policy": None}},
    "an old refusal": {
        "generations": [
            {"generation": G1, "state": "live", "gates": []},
            {"generation": G2, "state": "refused", "gates": []},
        ]
    },
    "little shed": {"queue": {"shed_lately": 9}},
    "events": {"events": events()},
    "few events": {"events": events(results={"accepted": 1, "too_many": 198})},
    "events of who was erased": {"events": events(results={"accepted": 500, "erased": 500})},
    "another refusal": {"events": events(refused={"overloaded": 3})},
    "events not looked at": {"events": dict.fromkeys(events()) | {"results": {}, "refused": {}}},
}


@pytest.mark.parametrize("name", QUIET)
def test_what_proves_nothing_raises_no_alarm(name: str) -> None:
    assert build_verdict(body(**QUIET[name]))["level"] == "ok"


def test_the_worst_comes_first_and_the_others_are_included() -> None:
    changes = WRONG["stale"][0] | WRONG["memory, much"][0]
    dashboard_verdict = build_verdict(body(**changes))

    assert dashboard_verdict["level"] == "bad" and "99% full" in dashboard_verdict["sentence"]
    assert [sentence for sentence in dashboard_verdict["also"] if "pointer_backwards" in sentence]


def test_answers_without_events_are_not_taken_for_a_pointer_that_went_astray() -> None:
    stale_replica = replica(stale="events_behind,pointer_backwards")
    dashboard_verdict = build_verdict(body(events=events(), replicas=[stale_replica]))

    assert "may lag behind what was published: pointer_backwards." in dashboard_verdict["sentence"]
    assert [sentence for sentence in dashboard_verdict["also"] if "lack accepted events" in sentence]


def test_without_redis_the_pointer_is_not_complained_about_as_well() -> None:
    changes = WRONG["redis away"][0] | {"replicas": [replica(stale="redis_unreachable")]}

    assert build_verdict(body(**changes))["also"] == []
