"""Production of answers: the ladder of sources, live inference, leases, and the fast path of plain lookups.

Start at `ladder`.
"""
