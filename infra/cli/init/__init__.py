"""`larder init`: a look at files of interactions and features, guesses of what their columns are, and a `larder.toml`.

Imports precompute.sources, and infra.cli above it nothing. Start at `command`; `roles` has the names that are known.
"""
