"""Experiments as the dashboard shows them: arms with what was counted of each, held against the control. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from cache.control.rate_ratio import rate_ratio
from serving.dashboard import counters


def experiments(
    experiment_rows: Sequence[Mapping[str, Any]], total: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Experiments with the counts of all workers that run; `experiment_rows` names arms, the control first.

    What was counted before a worker started is in `larder experiment status`.
    """
    requests = counters.by(total, counters.ARMS)
    events = _events(counters.by(total, counters.EVENTS))
    return [
        {
            **experiment_row,
            "arms": [
                _arm(experiment_row["experiment"], experiment_row["arms"], arm, requests, events)
                for arm in experiment_row["arms"]
            ],
        }
        for experiment_row in experiment_rows
    ]  # fmt: skip


def _events(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Counts of events by arm and event."""
    counts_by_arm: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        arm, _, event = name.rpartition("=")
        counts_by_arm.setdefault(arm, {})[event] = count
    return counts_by_arm


def _arm(
    experiment: str,
    arms: Sequence[Mapping[str, Any]],
    arm: Mapping[str, Any],
    requests: Mapping[str, int],
    events: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    control, arm_key = (f"{experiment}={compared_arm['arm']}" for compared_arm in (arms[0], arm))
    base, arm_counts = events.get(control, {}), events.get(arm_key, {})
    figures_by_event = {}
    for event in sorted({*base, *arm_counts}):
        count_and_requests = (arm_counts.get(event, 0), requests.get(arm_key, 0))
        ratio = None
        if arm_key != control:
            ratio = rate_ratio(*count_and_requests, base.get(event, 0), requests.get(control, 0))
        figures_by_event[event] = {
            "count": count_and_requests[0],
            "rate": count_and_requests[0] / count_and_requests[1]
            if count_and_requests[1]
            else None,
            "ratio": None if ratio is None else ratio._asdict(),
        }
    return {**arm, "requests": requests.get(arm_key, 0), "events": figures_by_event}
