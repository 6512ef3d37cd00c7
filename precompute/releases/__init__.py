"""Releases: moves of the pointer to the live generation; each is recorded before it is made.

Start at `release_log` and `moves`.
"""
