"""The model of `larder.toml`: a frozen class for each section, and how the file and the environment fill it.

Imports cache.control, cache.format, cache.store and cache.l2. Start at `night` and `serving`, then `reading`.
"""
