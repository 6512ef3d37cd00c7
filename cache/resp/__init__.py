"""Replies of Redis, bounded before they are parsed: a reader for hiredis, and parsers for redis-py's connections.

Imports cache.native. Start at `bounded_reader`.
"""
