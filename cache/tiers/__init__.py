"""A lookup through the tiers: L1 in this process, L2 in Redis, one read for all who ask at once.

Imports cache.l2, cache.format, cache.mrc and cache.native. Start at `tiered`.
"""
