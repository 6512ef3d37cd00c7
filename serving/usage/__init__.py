"""Usage: which ids are hot, which tables are read, samples of what was answered, how large L1 should be.

Imports serving.generations and serving.rendering. Start at `request_observer`.
"""
