"""Redis as the second tier: pooled connections, pipelines, clusters, sentinels, leases, a circuit breaker.

Start at `data_plane` and `control_plane`.
"""
