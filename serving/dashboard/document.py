"""The document of `GET /dashboard/data`, from what was seen. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cache.events.position import Position
from serving.answers.sources import Source
from serving.dashboard import counters
from serving.dashboard.aggregator import LATELY_BINS, FleetReading
from serving.dashboard.counters import merged
from serving.dashboard.experiments import experiments
from serving.dashboard.series import DrawnBin, quantiles, series
from serving.dashboard.time_bins import BIN_S
from serving.dashboard.verdict import verdict
from serving.events.overview import merge_rows
from serving.replica.redis_memory import memory

Worker = Mapping[str, Any]

SETTLED_S = 3.0
"""Seconds from the end of a bin until it is shown: by then every worker has told its part."""


def document(
    reading: FleetReading,
    *,
    schedule: Mapping[str, Any],
    archive: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    roles: Mapping[str, str],
    bounds: Sequence[float],
    advisor: Mapping[str, Any] | None,
    quality: Mapping[str, Any] | None,
    arms: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Every field of the contract; `roles` are those of the generations that this replica holds, by role.

    `arms` are the experiments that it holds, each with its arms, the control first.
    """
    workers = [reading.workers[name] for name in sorted(reading.workers)]
    end_bin_start = int((reading.read_at - SETTLED_S) // BIN_S) * BIN_S
    recent = merged(reading.lately.values())
    total = merged(worker["counts"] or {} for worker in workers)
    of = {generation: role for role, generation in roles.items()}
    generation_rows, nights = archive
    generations = [
        {**generation_row, "role": of.get(generation_row["generation"])}
        for generation_row in generation_rows
    ]
    body: dict[str, Any] = {
        "now": reading.read_at,
        "whole": reading.trouble is None,
        "trouble": reading.trouble,
        "replicas": replicas(workers, reading.read_at),
        "series": series(reading.rows, end_bin_start),
        "lately": {
            "seconds": LATELY_BINS * BIN_S,
            "requests": recent.get(counters.REQUESTS, 0),
            "answers": _answers(recent),
            "misses": counters.by(recent, counters.MISSES),
            "latency": quantiles(recent, bounds),
        },
        "earlier": {"answers": _earlier(reading.rows, reading.lately)},
        "totals": {
            "requests": total.get(counters.REQUESTS, 0),
            "answers": _answers(total),
            "misses": counters.by(total, counters.MISSES),
            "entities": total.get(counters.ENTITIES, 0),
        },
        "generations": generations,
        "schedule": dict(schedule),
        "nights": list(nights),
        "redis": redis(reading.infos),
        "breakers": {"closed": 0, "half_open": 0, "open": 0}
        | Counter(str(worker["breaker"]) for worker in workers),
        "queue": {
            "live_queued": _sum(workers, "live_queued"),
            "under_way": _sum(workers, "under_way"),
            "requests_max": _sum(workers, "requests_max"),
            "queue_seconds": max(
                (worker["queue_seconds"] or 0.0 for worker in workers), default=0.0
            ),
            "shed": total.get(counters.SHED, 0),
            "shed_lately": recent.get(counters.SHED, 0),
        },
        "l1": {
            "bytes": _sum(workers, "l1_bytes"),
            "budget_bytes": _sum(workers, "l1_budget_bytes"),
            "entries": _sum(workers, "l1_entries"),
        },
        "advisor": advisor,
        "quality": quality,
        "experiments": experiments(arms, total),
        "events": events(workers, recent, generations),
    }
    return {**body, "verdict": verdict(body)}


def _answers(counts: Mapping[str, int]) -> dict[str, int]:
    return {source.value: counts.get(counters.ANSWERS + source, 0) for source in Source}


def _earlier(rows: Mapping[int, DrawnBin], lately: Mapping[int, Any]) -> dict[str, int]:
    """Answers by source in the bins before those of `lately`."""
    answer_counts = Counter[str]()
    for start, row in rows.items():
        if start not in lately:
            answer_counts.update(row.answers)
    return {source.value: answer_counts[source] for source in Source}


def _sum(workers: Iterable[Worker], name: str) -> int:
    return sum(worker[name] or 0 for worker in workers)


def replicas(workers: Iterable[Worker], now_s: float) -> list[dict[str, Any]]:
    """Replicas by name, each the workers of one parent; it is as good, and as far, as the last of them."""
    groups: dict[str, list[Worker]] = {}
    for worker in workers:
        groups.setdefault(str(worker["replica"]), []).append(worker)
    replica_rows = []
    for name, group in sorted(groups.items()):
        last = min(group, key=lambda worker: worker["epoch"] or 0)
        replica_rows.append(
            {
                "replica": name,
                "workers": len(group),
                "generation": last["generation"],
                "epoch": last["epoch"],
                "ready": all(worker["ready"] for worker in group),
                "stale": _first(group, "stale"),
                "degraded": _first(group, "degraded"),
                "seen_s": round(max(max(0.0, now_s - worker["at"]) for worker in group), 3),
                "failed": _first(group, "failed"),
            }
        )
    return replica_rows


def _first(group: Iterable[Worker], name: str) -> str | None:
    return next((worker[name] for worker in group if worker[name]), None)


def events(
    workers: Iterable[Worker], recent: Mapping[str, int], generations: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Events as all workers tell of them, with what was counted of `recent`; None where none are taken in.

    A night has taken over what some generation has, published or not.
    """
    events_overview = merge_rows([worker.get("events") for worker in workers])
    if events_overview is None:
        return None
    answers = sum(counters.by(recent, counters.ANSWERS).values())
    newer_answer_count, lists = (
        recent.get(counters.NEWER_EVENT_ANSWERS, 0),
        recent.get(counters.COMPARED, 0),
    )
    taken_positions = [
        events_until
        for generation_row in generations
        if (events_until := generation_row.get("events_until")) is not None
    ]
    return {
        **events_overview,
        "results": counters.by(recent, counters.TAKEN_IN),
        "refused": counters.by(recent, counters.REFUSED),
        "answers": newer_answer_count,
        "answers_share": newer_answer_count / answers if answers else None,
        "list_change": recent.get(counters.CHANGED_PPM, 0) / (1e6 * lists) if lists else None,
        "taken_until": max(taken_positions, key=Position.parse, default=None),
    }


def redis(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Memory and evictions; of a cluster the sum of its nodes, and the policy that is worst."""
    if not infos:
        return dict.fromkeys(("used_bytes", "limit_bytes", "policy", "clients", "evicted"))
    policies = [str(info.get("maxmemory_policy", "")) for info in infos]
    used, limit = memory(infos)
    return {
        "used_bytes": used,
        "limit_bytes": limit or None,
        "policy": next((policy for policy in policies if policy.startswith("allkeys")), policies[0])
        or None,
        "clients": sum(int(info.get("connected_clients", 0)) for info in infos),
        "evicted": sum(int(info.get("evicted_keys", 0)) for info in infos),
    }
