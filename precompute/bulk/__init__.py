"""Bulk work on Redis: pages in, read back, out again, never at the expense of readers.

Start at `load` and `governor`.
"""
