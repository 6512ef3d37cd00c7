"""Redis as the second tier: pooled connections, pipelines, replies as one buffer, leases, a circuit breaker.

Imports cache.format and cache.native. Start at `tier`.
"""
