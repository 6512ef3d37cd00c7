"""Scoring of users: a shard's users read, put through the towers, compared with all items, and written as pages.

Imports `scoring`. Start at `shard`; `work` is what all chunks of a shard share.
"""
