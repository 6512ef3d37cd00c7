"""Freshness: what lists find of users' next items by nights, hourly nights and events, replayed from a log.

Imports reference, partitions, erasures, bundles and sources. Start at `replay`.
"""
