"""Lookup of a record through the tiers: L1 in this process, then L2 in Redis, read once for simultaneous requests.

Start at `tiered`.
"""
