"""Small values that night and day agree on: schedule, steps of a night, splits of keys, hot keys, the staging note.

Imports cache.format. Start at `schedule`.
"""
