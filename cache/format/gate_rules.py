"""Ids of gate rules that more than their gate refers to; all ids stand in manifests, overrides, metrics and alerts."""

from typing import Final

REDIS_HEADROOM: Final = "redis_headroom"
DISK_HEADROOM: Final = "disk_headroom"
SKEW: Final = "skew"
SKEW_COSINE: Final = "skew_cosine"

SKEW_DEPTH: Final = 20
"""Items of a list that `skew` compares at most, by night and by day: shorter lists agree less, by nature."""
