"""Releases: which generation is live, by which moves, written down first.

Start at `release_log` and `moves`.
"""
