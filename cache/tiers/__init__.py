"""Lookup of a record through the tiers: L1 in this process, then L2 in Redis, with one read for concurrent requests.

Start at `tiered`.
"""
