"""Stored bytes that the night writes and the service reads: keys, records, directory, manifest and item table.

The tests check these bytes against golden files. Start at `redis_keys` and `directory`.
"""
