"""A lookup through the tiers: L1 in this process, L2 in Redis, one read for all who ask at once.

Start at `tiered`.
"""
