"""The second tier over Redis Cluster: which node has which slot, and a read spread over the nodes.

Imports cache.l2. Start at `tier`, its data plane.
"""
