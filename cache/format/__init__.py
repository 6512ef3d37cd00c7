"""Stored bytes: keys, records, directory, manifest and the item table, as writer and reader agree on them.

Golden files in the tests hold these bytes. Start at `redis_keys` and `directory`.
"""
