"""Bulk work on Redis: loading, reading back and removing pages, always with lower priority than readers.

Start at `load` and `governor`.
"""
