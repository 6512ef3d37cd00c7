"""Redis as the second tier: pooled connections, pipelines, replies as one buffer, leases, a circuit breaker.

Imports cache.format, cache.native, cache.resp and cache.l2.sentinel. Start at `data_plane`, what readers ask for, and
`control_plane`, what the background does; `tier` has both for one server.
"""
