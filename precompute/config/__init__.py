"""Settings of a night, from `larder.toml` and the environment, checked before anything starts.

Imports cache alone, whose room `config` has the model. Start at `settings`.
"""
