"""Events that nights take over: the stream as files in the store, read as interactions, trimmed, and erased from.

Start at `stream`.
"""
