"""The model of `larder.toml`: a frozen class for each section, and how the file and the environment fill it.

Start at `night` and `serving`.
"""
