"""The way to an answer: the ladder of sources, live inference, leases, and the hot route of plain lookups.

Start at `ladder`.
"""
