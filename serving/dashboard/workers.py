"""Validation of the rows in the table of workers: which can be shown beside others. Pure."""

from collections.abc import Mapping
from typing import Any

from serving.dashboard.counters import is_count
from serving.usage.l1_curve import together

_TEXTS = ("generation", "stale", "degraded", "failed")
_NUMBERS = (
    "since", "epoch", "live_queued", "under_way", "requests_max", "queue_seconds",
    "l1_bytes", "l1_budget_bytes", "l1_entries",
)  # fmt: skip


def can_be_shown(row: Mapping[str, Any]) -> bool:
    """Returns whether the fields that a row has are of their kinds: one of another kind would cost the whole page."""
    counts = row.get("counts") or {}
    return (
        all(isinstance(row.get(name), str | None) for name in _TEXTS)
        and all(row.get(name) is None or is_count(row[name]) for name in _NUMBERS)
        and isinstance(counts, dict)
        and all(map(is_count, counts.values()))
        and _is_advice(row.get("advisor"))
    )


def _is_advice(told: Any) -> bool:
    try:
        together([told])
    except Exception:  # whatever it is, nothing can be made of it
        return False
    return True
