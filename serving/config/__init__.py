"""Settings of the service, from its environment and `larder.toml`, checked before it starts.

Start at `settings`.
"""
