"""Replies of Redis, bounded and of their command's shape: a reader for hiredis, parsers and checks for redis-py.

Imports cache.native. Start at `bounded_reader`.
"""
