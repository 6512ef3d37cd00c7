"""Experiments as the dashboard shows them: arms with what was counted of each, held against the control. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from cache.control.rate_ratio import rate_ratio
from serving.dashboard import counters


def experiments(
    told: Sequence[Mapping[str, Any]], total: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Experiments with the counts of all workers that run; `told` names arms, the control first.

    What was counted before a worker started is in `larder experiment status`.
    """
    requests = counters.by(total, counters.ARMS)
    events = _events(counters.by(total, counters.EVENTS))
    return [
        {**each, "arms": [_arm(each["experiment"], each["arms"], arm, requests, events) for arm in each["arms"]]}
        for each in told
    ]  # fmt: skip


def _events(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Counts of events by arm and event."""
    found: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        arm, _, event = name.rpartition("=")
        found.setdefault(arm, {})[event] = count
    return found


def _arm(
    experiment: str,
    arms: Sequence[Mapping[str, Any]],
    arm: Mapping[str, Any],
    requests: Mapping[str, int],
    events: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    control, own = (f"{experiment}={each['arm']}" for each in (arms[0], arm))
    base, found = events.get(control, {}), events.get(own, {})
    shown = {}
    for event in sorted({*base, *found}):
        counted = (found.get(event, 0), requests.get(own, 0))
        ratio = None
        if own != control:
            ratio = rate_ratio(*counted, base.get(event, 0), requests.get(control, 0))
        shown[event] = {
            "count": counted[0],
            "rate": counted[0] / counted[1] if counted[1] else None,
            "ratio": None if ratio is None else ratio._asdict(),
        }
    return {**arm, "requests": requests.get(own, 0), "events": shown}
