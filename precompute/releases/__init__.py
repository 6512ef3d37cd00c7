"""Releases: which generation is live, by which moves, written down first.

Imports bulk, config and control. Start at `release_log`, then `moves`.
"""
