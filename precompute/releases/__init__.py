"""Releases: which generation is live, by which moves, written down first."""
