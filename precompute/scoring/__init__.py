"""Scoring of a shard: inputs bound to towers, users compared with items, pages of records written.

Start at `users`.
"""
