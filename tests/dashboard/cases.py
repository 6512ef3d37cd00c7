"""Documents that a service may send to its dashboard: well, in trouble, new, unknown, huge, hostile."""

import copy
import json
from typing import Any

from tests.dashboard.contract import Dashboard
from tests.dashboard.healthy import NOW_S, well

HOSTILE = "<script>window.struck = 1</script><img src=x onerror='window.struck = 1'>"


def without_redis() -> Dashboard:
    """Redis is away: one worker's numbers, all fallbacks."""
    data = copy.deepcopy(well())
    return data | {  # type: ignore[return-value]
        "whole": False,
        "trouble": "Redis does not answer within 75 ms",
        "verdict": {
            "level": "bad",
            "sentence": "Redis cannot be reached: answers come from memory, live inference and defaults.",
            "advice": "Start Redis, then run: larder restore",
            "also": ["Previous and default answer 31 % more than an hour ago.", "The breaker is open."],
        },
        "replicas": [{**data["replicas"][0], "stale": "pointer_unreadable", "workers": 1}],  # type: ignore[index]
        "redis": None,
        "breakers": {"closed": 0, "half_open": 0, "open": 1},
        "quality": None,
    }


def before_first_night() -> Dashboard:
    """Nothing has been published, so no request was answered."""
    data = copy.deepcopy(well(bins=4))
    series: Any = data["series"]
    replaced_fields: Any = {
        "verdict": {"level": "warn", "sentence": "No generation has been published yet.",
                    "advice": "Run the first night: larder night"},
        "series": {**series, "requests": [0] * 4, "answers": {"l1": [0] * 4},
                   "seconds": {}, "stages": {}, "misses": {}},
        "totals": {"requests": 0, "answers": {}, "misses": {}, "entities": 0},
        "replicas": [{**data["replicas"][0], "ready": False, "generation": None, "epoch": None}],  # type: ignore[index]
        "generations": [], "nights": [], "schedule": {"age_s": None, "due_at": NOW_S - 3600, "missing": True},
        "l1": {"bytes": 0, "budget_bytes": 268_435_456, "entries": 0}, "advisor": None, "quality": None,
    }  # fmt: skip
    return data | replaced_fields  # type: ignore[no-any-return]


def nothing_known() -> Dashboard:
    """Return a document with null wherever null is allowed at the top."""
    return dict.fromkeys(Dashboard.__annotations__)  # type: ignore[return-value]


def hollow() -> Dashboard:
    """Return a document with all objects, in which every number and text is null."""

    def emptied(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: emptied(child) for name, child in value.items()}
        return [emptied(child) for child in value] if isinstance(value, list) else None

    data, healthy_dashboard = emptied(well(bins=30)), well(bins=30)
    data["verdict"] = healthy_dashboard["verdict"]
    data["series"] |= {"step_s": 10, "at": healthy_dashboard["series"]["at"]}  # type: ignore[index]
    data["totals"] |= {"answers": {}, "misses": {}}
    for name, key in (("replicas", "replica"), ("generations", "generation"), ("nights", "generation")):  # fmt: skip
        data[name] = [row | {key: f"{name}-{i}"} for i, row in enumerate(data[name])]
    for generation in data["generations"]:
        generation["gates"] = None
        generation["remarks"] = None
    for night in data["nights"]:
        night["steps"] = None
    data["breakers"], data["advisor"]["curve"] = {}, []
    return data  # type: ignore[no-any-return]


def huge() -> Dashboard:
    """Every number is a billion times as large, some beyond what arithmetic can add up."""

    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: grown(child) for name, child in value.items()}
        if isinstance(value, list):
            return [grown(child) for child in value]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value * 1e9 if is_number else value

    data, healthy_dashboard = grown(well(bins=60)), well(bins=60)
    data |= {"now": healthy_dashboard["now"]}
    data["series"] |= {"step_s": 10, "at": healthy_dashboard["series"]["at"]}  # type: ignore[index]
    data["series"]["requests"][3:5] = [1.7e308, 1.7e308]
    return data  # type: ignore[no-any-return]


def one_of_many() -> Dashboard:
    """Forty replicas, one of which lags behind and fails."""
    data = copy.deepcopy(well(bins=120))
    first: Any = data["replicas"][0]  # type: ignore[index]
    other_replicas = [{**first, "replica": f"serve-{index:02}", "seen_s": index / 10} for index in range(39)]
    odd = {**first, "replica": "serve-behind", "generation": "20261121T000000Z-9aa01b77c0de", "ready": False,
           "failed": "checksum of page 7 of user_topk differs", "seen_s": 4.0}  # fmt: skip
    verdict = {"level": "warn", "sentence": "One of 40 replicas answers from another generation.",
               "advice": "Read the log of serve-behind."}  # fmt: skip
    return data | {"replicas": [*other_replicas, odd], "verdict": verdict}  # type: ignore[return-value]


def hostile() -> Dashboard:
    """Return a document in which every text, and every name that is free, tries to be markup."""
    data: Any = copy.deepcopy(well(bins=60))

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: spoiled(child) for name, child in value.items()}
        if isinstance(value, list):
            return [spoiled(child) for child in value]
        return HOSTILE if isinstance(value, str) else value

    level = data["verdict"]["level"]
    data = spoiled(data)
    data["verdict"] |= {"level": level, "also": [HOSTILE, HOSTILE]}
    data["totals"]["misses"] = {HOSTILE: 5, "__proto__": 4, "constructor": 3}
    data["series"]["answers"][HOSTILE] = data["series"]["requests"]
    data["breakers"][HOSTILE] = 1
    return data  # type: ignore[no-any-return]


CASES = {
    build_dashboard.__name__: build_dashboard
    for build_dashboard in (well, without_redis, before_first_night, nothing_known, hollow, huge, one_of_many, hostile)
}  # fmt: skip


def as_json(data: object) -> bytes:
    """Encode as the service does; refuse what JSON cannot express."""
    return json.dumps(data, allow_nan=False).encode()
