"""Stored bytes: keys, records, directory, manifest and the item table, as writer and reader agree on them.

Imports cache.format.records, cache.native and cache.errors. Golden files in the tests hold these bytes. Start at
`records`, then `ids` and `redis_keys`.
"""
