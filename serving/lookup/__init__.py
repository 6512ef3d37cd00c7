"""The complete way of a lookup: the ladder of sources, live inference in batches, leases for cold keys.

Imports serving.usage and the rooms below it. Start at `ladder`.
"""
