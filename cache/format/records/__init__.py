"""Records: the one description of their bytes, the rounding of their numbers, and the codec made from both.

Imports cache.errors alone. Start at `layout`: all that knows a record's bytes, the C sources included, follows it.
"""
