"""The document from what was seen; the contract's fields, all of them, whatever is known."""

from typing import Any

from serving.dashboard.aggregator import FleetReading, draw_bin
from serving.dashboard.document import DASHBOARD_SCHEMA, SETTLED_S, build_document, summarise_redis, summarise_replicas
from serving.metrics.collectors import refine_bounds

BOUNDS = refine_bounds((0.001, 1.0))
NOW_S = 1_000_000.0
LIVE_GENERATION = {"generation": "g2", "state": "live", "gates": []}


def worker(replica: str = "a", **changes: Any) -> dict[str, Any]:
    fine = {
        "at": NOW_S - 0.5, "since": 0.0, "replica": replica, "generation": "g2", "epoch": 2,
        "ready": True, "stale": None, "degraded": None, "failed": None, "tokens_stale": None, "tls_stale": None,
        "store_problem": None, "canary_problem": None, "breaker": "closed",
        "live_queued": 1, "under_way": 2, "requests_max": 10, "queue_seconds": 0.25,
        "l1_bytes": 5, "l1_budget_bytes": 50, "l1_entries": 3, "events": None,
        "counts": {"r": 4, "e": 3, "x": 1, "a:l1": 2, "a:default": 1, "m:cold": 1},
    }  # fmt: skip
    return fine | changes


def make_document(reading: FleetReading, **changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "schedule_fields": {"age_s": None, "due_at": 0.0, "missing": False}, "generation_and_night_rows": ([], []),
        "generation_by_role": {}, "bucket_bounds": BOUNDS, "advisor_fields": None, "quality_fields": None,
    }  # fmt: skip
    return build_document(reading, **(parts | changes))


def test_workers_add_up() -> None:
    workers = {"w1": worker(), "w2": worker(breaker="open"), "w3": worker("b", counts=None)}
    counts = {"r": 8, "e": 6, "a:l1": 4, "a:default": 2, "m:cold": 2, "x": 2, "h:l1:10": 4}
    bins = {999_980: counts, 999_990: {"r": 1}}
    rows = {start: draw_bin(bin_counts, BOUNDS) for start, bin_counts in bins.items()} | {
        999_000: draw_bin({"a:l2": 7}, BOUNDS)
    }
    dashboard_document = make_document(
        FleetReading(NOW_S, None, workers, rows, bins),
        generation_and_night_rows=([LIVE_GENERATION], []),
        generation_by_role={"live": "g2"},
    )

    assert set(dashboard_document) == set(DASHBOARD_SCHEMA["properties"])
    assert dashboard_document["totals"] == {
        "requests": 8, "entities": 6, "misses": {"cold": 2},
        "answers": {"l1": 4, "l2": 0, "live": 0, "previous": 0, "default": 2},
    }  # fmt: skip
    assert dashboard_document["lately"]["requests"] == 9 and dashboard_document["lately"]["latency"]["l1"]["p50"] > 0
    assert dashboard_document["earlier"]["answers"]["l2"] == 7
    assert dashboard_document["breakers"] == {"closed": 2, "half_open": 0, "open": 1}
    assert dashboard_document["queue"] == {
        "live_queued": 3, "under_way": 6, "requests_max": 30, "queue_seconds": 0.25, "shed": 2,
        "shed_lately": 2,
    }  # fmt: skip
    assert dashboard_document["l1"] == {"bytes": 15, "budget_bytes": 150, "entries": 9}
    assert dashboard_document["generations"] == [{**LIVE_GENERATION, "role": "live"}]
    # A bin is drawn only once it is over and all workers have reported it.
    assert SETTLED_S < 10 and dashboard_document["series"]["at"][-1] == 999_980


def test_a_replica_is_as_far_as_the_last_of_its_workers() -> None:
    late = worker(generation="g1", epoch=1, ready=False, failed="no room", at=NOW_S - 4)
    (first, second_replica) = summarise_replicas([worker(), late, worker("b")], NOW_S)

    assert first == {
        "replica": "a", "workers": 2, "generation": "g1", "epoch": 1, "ready": False, "stale": None,
        "degraded": None, "seen_s": 4.0, "failed": "no room", "tokens_stale": None, "tls_stale": None,
        "store_problem": None, "canary_problem": None,
    }  # fmt: skip
    assert (second_replica["replica"], second_replica["generation"], second_replica["ready"]) == ("b", "g2", True)


def test_a_cluster_is_the_sum_of_its_nodes() -> None:
    node = {
        "used_memory": 10, "maxmemory": 100, "maxmemory_policy": "volatile-lru",
        "connected_clients": 3, "evicted_keys": 1,
    }  # fmt: skip

    assert summarise_redis([node, node | {"maxmemory_policy": "allkeys-lru"}]) == {
        "used_bytes": 20, "limit_bytes": 200, "policy": "allkeys-lru", "clients": 6, "evicted": 2,
    }  # fmt: skip
    assert summarise_redis([node, node | {"maxmemory": 0}])["limit_bytes"] is None
    assert set(summarise_redis([]).values()) == {None}


def test_events_are_those_of_all_workers_and_of_the_last_minutes() -> None:
    events_row = {"up": 1.0, "durability": "always", "demanded": "any", "lag_s": 0.5, "counted_until": "30-0"}
    workers = {"w1": worker(events=events_row), "w2": worker(events=events_row | {"lag_s": 3.0}), "w3": worker()}
    bins = {
        999_980: {"a:l1": 6, "a:live": 4, "w": 5, "c": 2, "d": 300_000, "v:accepted": 7, "v:in_future": 1},
        999_990: {"v:accepted": 2, "y:events_full": 3, "c": 1},
    }  # fmt: skip
    rows = {start: draw_bin(bin_counts, BOUNDS) for start, bin_counts in bins.items()}
    generations = [
        LIVE_GENERATION | {"events_until": "9-0"},
        LIVE_GENERATION | {"events_until": "20-1"},
        LIVE_GENERATION | {"events_until": None},
    ]
    dashboard_document = make_document(
        FleetReading(NOW_S, None, workers, rows, bins), generation_and_night_rows=(generations, [])
    )

    assert dashboard_document["events"] == dashboard_document["events"] | {
        "up": True, "durability": "always", "lag_s": 3.0, "counted_until": "30-0", "taken_until": "20-1",
        "published_until": None, "results": {"accepted": 9, "in_future": 1}, "refused": {"events_full": 3},
        "answers": 5, "answers_share": 0.5, "list_change": 0.1,
    }  # fmt: skip
    assert set(dashboard_document["events"]) == set(DASHBOARD_SCHEMA["properties"]["events"]["anyOf"][0]["properties"])
    assert dashboard_document["series"]["events"] == {"accepted": [7], "repeated": [0], "rejected": [1]}


def test_without_events_the_document_has_none() -> None:
    dashboard_document = make_document(FleetReading(NOW_S, None, {"w1": worker()}, {}, {}))

    assert dashboard_document["events"] is None and dashboard_document["series"]["events"] == {}


def test_nothing_is_known_yet() -> None:
    dashboard_document = make_document(FleetReading(NOW_S, "gone", {}, {}, {}))

    assert dashboard_document["whole"] is False and dashboard_document["verdict"]["level"] == "bad"
    assert dashboard_document["series"]["at"] == [] and dashboard_document["replicas"] == []
