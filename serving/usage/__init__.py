"""Usage: which ids are hot, which tables are read, how large L1 should be.

Start at `attach`.
"""
