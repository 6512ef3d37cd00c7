"""The fast way of a lookup, for plain requests: it skips tasks, parsing and rendering, and falls back to the ladder.

Imports serving.lookup. Nothing but serving.app imports it. Start at `dispatcher`.
"""
