"""Settings of a night, checked before anything starts, and what its commands show on a terminal.

Start at `settings`.
"""
