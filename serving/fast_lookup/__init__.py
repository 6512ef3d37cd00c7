"""The fast way of a lookup, for plain requests: it skips tasks, parsing and rendering, and falls back to the ladder.

Imports serving.lookup. Nothing but serving.http and serving.fast_http imports it. Start at `dispatcher`.
"""
