"""Bulk work on Redis: pages in, read back, out again, never at the expense of readers.

Imports config and control. Start at `load`, then `governor`.
"""
