"""Settings of the service, from its environment and `larder.toml`, checked before anything starts.

Imports serving.requests for its limits; the model is `cache.config`. Start at `settings`.
"""
