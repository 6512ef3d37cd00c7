"""Small values that night and day agree on through Redis: schedule, canary split, hot keys, the staging note.

Imports cache.format. Start at `schedule`.
"""
