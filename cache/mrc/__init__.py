"""Miss-ratio curves of an LRU cache from a sample of its accesses (SHARDS).

Imports nothing of the other rooms. Start at `shards`.
"""
