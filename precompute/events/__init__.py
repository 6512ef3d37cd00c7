"""Events that nights take over: the stream is written to files in the store, read as interactions, and trimmed.

Start at `stream`.
"""
