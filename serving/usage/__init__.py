"""Usage: which ids are hot, which tables are read, samples of what was answered, how large L1 should be.

Start at `request_observer`.
"""
