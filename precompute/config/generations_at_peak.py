"""Number of generations that coexist at the peak: one formula for sweep, gates, planner, alerts and documents. Pure."""


def retained(keep: int) -> int:
    """Superseded generations that a sweep leaves; the newest one, where a roll back lands, is always among them."""
    return max(1, keep)


def generations_at_peak(keep: int) -> int:
    """Number of generations in Redis and on each host: live, `retained`, the one being made, and one not published.

    The last is a canary, or what a refused or broken night has left where no sweep may touch it yet.
    """
    return 1 + retained(keep) + 1 + 1
