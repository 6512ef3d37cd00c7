"""A replica's background work: heartbeat, blocklist, freshness, release records, its share in a canary.

Imports serving.generations and serving.rendering. Start at `background`.
"""
