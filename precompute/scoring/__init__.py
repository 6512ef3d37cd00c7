"""A shard scored: inputs bound to towers, users compared with items, pages of records written.

Imports builds, topk and device. Start at `users`.
"""
