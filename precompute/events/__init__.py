"""Events that nights take over: the stream as files in the store, read as interactions, trimmed, and erased from.

Imports what is below `releases`. Start at `taking`; `files` says what a night has of them.
"""
