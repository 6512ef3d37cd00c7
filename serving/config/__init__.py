"""Settings of the service, from its environment and `larder.toml`, checked before anything starts.

Start at `settings`.
"""
