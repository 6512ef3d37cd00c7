"""Scoring: every known entity through the towers and the exact top-K, shard by shard, into pages."""
