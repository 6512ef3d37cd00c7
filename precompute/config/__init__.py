"""Settings of a night, from `larder.toml` and the environment, checked before anything starts.

Imports cache alone. Start at `settings`, then `sections`.
"""
