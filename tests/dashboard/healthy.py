"""The document of a healthy service: two replicas, an hour under load, a week of nights."""

import math
import random
from typing import Any

from tests.dashboard.contract import Dashboard

NOW_S = 1_795_338_000.0
HOUR_BINS = 361
SOURCES = ("l1", "l2", "live", "previous", "default")
STEPS = (
    "begin", "embed items", "score", "assemble", "index", "quantize", "load", "verify", "publish", "warm", "retire",
)  # fmt: skip
RULES = (
    "coverage", "finite", "recall", "score_psi", "redis_headroom", "skew", "tables_of_live", "holdout_ndcg",
)  # fmt: skip


def well(now_s: float = NOW_S, bins: int = HOUR_BINS, seed: int = 6) -> Dashboard:
    """Return the document of two replicas after a good night: an hour under load with a flip in the middle."""
    draw = random.Random(seed)
    series = _series(now_s, bins, draw)
    live_generation_id = "20261122T000000Z-4c279bf25f9b"
    return {
        "now": now_s,
        "whole": True,
        "verdict": {
            "level": "ok",
            "sentence": "All is well: predictions are 9 h old, 96.1 % come from memory or Redis.",
            "advice": None,
        },
        "replicas": [
            _replica("serve-a", live_generation_id, now_s),
            _replica("serve-b", live_generation_id, now_s - 1.4),
        ],
        "series": series,
        "totals": {
            "requests": 4_812_907,
            "answers": {"l1": 9_120_551, "l2": 3_720_114, "live": 402_113, "previous": 3_020, "default": 92_107},
            "misses": {
                "not_in_generation": 301_882, "cold_start": 92_107, "input_changed": 71_330, "fresh": 22_410,
                "l2_timeout": 6_104, "l2_down": 2_872, "evicted": 388, "page_missing": 2, "corrupt": 1,
            },
            "entities": 13_337_905,
        },
        "generations": [
            _generation(live_generation_id, "live", "live", now_s - 7 * 3600, draw),
            _generation("20261121T000000Z-9aa01b77c0de", "superseded", "previous", now_s - 31 * 3600, draw),
            _refused("20261120T000000Z-31c5f8ab0077", now_s - 55 * 3600, draw),
            _generation("20261119T000000Z-77d0e1b2c3d4", "retired", None, now_s - 79 * 3600, draw),
        ],
        "schedule": {"age_s": 32_400.0, "due_at": now_s - 8 * 3600, "missing": False},
        "nights": [_night(day, now_s, draw) for day in range(7)],
        "redis": {
            "used_bytes": 1_471_000_000, "limit_bytes": 2_147_483_648, "policy": "volatile-lru", "clients": 14,
            "evicted": 0,
        },
        "breakers": {"closed": 4, "half_open": 0, "open": 0},
        "queue": {"live_queued": 3, "under_way": 41, "requests_max": 4096, "queue_seconds": 0.0021, "shed": 0},
        "l1": {"bytes": 201_326_592, "budget_bytes": 268_435_456, "entries": 214_882},
        "advisor": {
            "sampling_rate": 0.01,
            "sampled": 8_192,
            "budget_bytes": 268_435_456,
            "hit_ratio": 0.682,
            "sentence": "L1 of 256 MiB gives 68.2 %, doubling adds 10.5 points, halving costs 9.7",
            "curve": [
                {"bytes": size << 20, "entries": size * 800, "hit_ratio": 0.86 * (1 - math.exp(-((size / 120) ** 0.6)))}
                for size in (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
            ],
        },
        "quality": {
            "samples": 12_480,
            "since": now_s - 6.8 * 3600,
            "exact": {"rate": 0.9871, "low": 0.985, "high": 0.989},
            "overlap": {"mean": 0.9968, "low": 0.9961, "high": 0.9974},
            "score_error": {"mean": 0.000412, "p99": 0.005},
            "age_s": 30_120.0,
            "drift": False,
            "drifted": [],
            "sentence": "Of 12480 served answers computed again 98.7 % were the same (98.5 to 98.9 %), "
            "with 99.7 % of the items.",
            "by": [
                _stratum(*stratum_arguments) for stratum_arguments in (
                    ("user_topk", "l1", "batch", "100+", 6120, 0.989, 0.9974),
                    ("user_topk", "l1", "batch", "10-99", 2210, 0.987, 0.9969),
                    ("user_topk", "l2", "batch", "10-99", 1840, 0.986, 0.9962),
                    ("user_topk", "l2", "batch", "1-9", 1902, 0.985, 0.9958),
                    ("user_topk", "live", "live", "none", 408, 0.961, 0.981),
                )
            ],
            "worklist": 1_204,
            "read_share": 0.3127,
            "hits_per_gb": 21_204_817.4,
        },
        "events": {
            "up": True, "durability": "everysec", "demanded": "everysec", "writes_refused": None,
            "results": {"accepted": 61_204, "repeated": 912, "too_many": 188, "invalid_field": 41},
            "refused": {}, "answers": 21_377, "answers_share": 0.0412, "list_change": 0.187, "lag_s": 0.004,
            "users": 12_902, "held_bytes": 9_437_184, "held_max_bytes": 268_435_456, "stream_bytes": 71_303_168,
            "stream_max_bytes": 268_435_456, "stream_length": 402_118, "inbox_length": 3, "inbox_lag_seconds": 0.02,
            "counted_until": f"{round(now_s * 1000) - 40}-2", "taken_until": f"{round((now_s - 8 * 3600) * 1000)}-0",
            "published_until": f"{round((now_s - 8 * 3600) * 1000)}-0",
        },
        "experiments": [{
            "experiment": "ranker", "share": 0.2, "started_at": now_s - 12 * 86_400, "arms": [
                _arm("control", "shop", 0.5, 212_480, 10_611),
                _arm("b", "shop-b", 0.5, 211_902, 11_507, (1.087, 1.021, 1.158)),
            ],
        }],
    }  # fmt: skip


def _arm(
    arm: str, namespace: str, traffic_share: float, requests: int, clicks: int, ratio: tuple[float, ...] = ()
) -> Any:
    ratio_interval = dict(zip(("ratio", "low", "high"), ratio, strict=True)) if ratio else None
    return {
        "arm": arm, "namespace": namespace, "share": traffic_share, "requests": requests,
        "generation": "20261120T000000Z-4c279bf25f9b",
        "events": {"click": {"count": clicks, "rate": clicks / requests, "ratio": ratio_interval}},
    }  # fmt: skip


def _stratum(table: str, source: str, producer: str, band: str, samples: int, exact: float, overlap: float) -> Any:
    half = 2 * math.sqrt(exact * (1 - exact) / samples)
    return {
        "table": table, "source": source, "producer": producer, "band": band, "samples": samples,
        "exact": {"rate": exact, "low": exact - half, "high": exact + half},
        "overlap": {"mean": overlap, "low": overlap - half / 4, "high": overlap + half / 4},
        "score_error": {"mean": 0.0004, "p99": 0.005}, "age_s": 30_120.0,
    }  # fmt: skip


def _series(now_s: float, bins: int, draw: random.Random) -> Any:
    at = [now_s - 10 * (bins - index) for index in range(bins)]
    requests, answers = [], {source: [] for source in SOURCES}  # type: ignore[var-annotated]
    for index in range(bins):
        load = 1300 + 260 * math.sin(index / 40) + draw.gauss(0, 40)
        swap = math.exp(-((index - bins * 0.55) ** 2) / 90) if index > bins * 0.55 else 0.0
        share_by_source = {
            "live": 0.03 + 0.02 * swap, "previous": 0.0004 + 0.02 * swap, "default": 0.007,
            "l1": 0.68 - 0.4 * swap + draw.gauss(0, 0.006),
        }  # fmt: skip
        share_by_source["l2"] = 1 - sum(share_by_source.values())
        requests.append(round(load * 10))
        for source in SOURCES:
            answers[source].append(max(0, round(load * 27 * share_by_source[source])))
    typical = {"l1": 0.0003, "l2": 0.0007, "live": 0.0031, "previous": 0.0009, "default": 0.0005}
    seconds = {
        source: {
            name: [typical[source] * factor * math.exp(draw.gauss(0, 0.08)) for _ in at]
            for name, factor in (("p50", 1), ("p99", 4.2), ("p999", 13))
        }
        for source in SOURCES
    }
    spent = {"parse": 0.12, "stored": 0.9, "live": 1.7, "previous": 0.02, "render": 0.3, "inference": 1.1}
    stages = {name: [mean_spent * abs(draw.gauss(1, 0.08)) for _ in at] for name, mean_spent in spent.items()}
    misses = {
        reason: [max(0, round(draw.gauss(per, per / 6))) for _ in at]
        for reason, per in (("not_in_generation", 840), ("cold_start", 250), ("input_changed", 190), ("fresh", 60))
    }  # fmt: skip
    events = {
        result: [max(0, round(draw.gauss(per, per / 5))) for _ in at]
        for result, per in (("accepted", 2_040), ("repeated", 30), ("rejected", 8))
    }
    return {
        "step_s": 10, "at": at, "requests": requests, "answers": answers, "seconds": seconds, "stages": stages,
        "misses": misses, "events": events,
    }  # fmt: skip


def _replica(name: str, generation: str, now_s: float) -> Any:
    return {
        "replica": name, "workers": 2, "generation": generation, "epoch": 1_795_312_800_123, "ready": True,
        "stale": None, "degraded": None, "seen_s": NOW_S - now_s + 0.4, "failed": None, "tokens_stale": None,
        "tls_stale": None, "store_problem": None, "canary_problem": None,
    }  # fmt: skip


def _generation(name: str, state: str, role: str | None, published: float, draw: random.Random) -> Any:
    return {
        "generation": name, "state": state, "epoch": int(published * 1000), "role": role, "published_at": published,
        "data_until": published - 2 * 3600, "bytes": draw.randrange(600_000_000, 640_000_000), "records": 1_019_858,
        "gates": [
            {"rule": rule, "value": round(draw.uniform(0.95, 1), 5), "threshold": 0.9, "verdict": "passed"}
            for rule in RULES
        ],
        "reason": None, "remarks": ["10% of the rows have no time, and count as the oldest of all"],
    }  # fmt: skip


def _refused(name: str, at: float, draw: random.Random) -> Any:
    refused_generation = _generation(name, "refused", None, at, draw)
    refused_generation["gates"][3] = {"rule": "score_psi", "value": 0.2417, "threshold": 0.1, "verdict": "failed",
                         "note": "the decile from 0.91 to 0.97 has grown most"}  # fmt: skip
    return refused_generation | {"published_at": None, "epoch": None, "reason": "score_psi: 0.2417 is above 0.1"}


def _night(day: int, now_s: float, draw: random.Random) -> Any:
    typical = (44, 31, 1260, 38, 120, 24, 410, 95, 6, 12, 9)
    outcome = "refused" if day == 2 else "published"
    steps = [
        {"step": step, "seconds": seconds * draw.uniform(0.85, 1.2)}
        for step, seconds in zip(STEPS, typical, strict=True)
    ]
    began_at = now_s - (day * 24 + 8) * 3600
    return {
        "generation": f"night-{day}", "outcome": outcome, "began_at": began_at, "steps": steps,
        "reuse": _reuse(day, draw),
    }  # fmt: skip


def _reuse(day: int, draw: random.Random) -> Any:
    """Return a night's copies; the second oldest had a new bundle, the oldest is of a version that reported none."""
    if day == 6:
        return None
    users = {name: round(typical_count * draw.uniform(0.9, 1.1)) for name, typical_count in (
        ("copied", 208_000), ("inputs", 23_000), ("lost", 6_100), ("entered", 1_700), ("computed", 0),
    )}  # fmt: skip
    if day == 5:
        users = dict.fromkeys(users, 0) | {"computed": 238_864}
    copied_share = users["copied"] / sum(users.values())
    return {
        "users": users, "share": copied_share, "spared_s": 1400 * copied_share, "base": f"night-{day + 1}",
        "why": "the bundle differs from those of earlier nights" if day == 5 else "", "read_because": "",
        "lately": {
            "nights": 14, "users": {reason: 14 * n for reason, n in users.items()}, "share": 0.871, "spared_s": 1180.0,
        },
    }  # fmt: skip
