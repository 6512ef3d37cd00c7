"""Settings of a night, from `larder.toml` and the environment, checked before anything starts.

Start at `settings`.
"""
