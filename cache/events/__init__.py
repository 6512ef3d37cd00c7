"""Fresh events: what users did since a generation was made, and where each event stands in the stream of all.

Imports cache.format, cache.store, cache.model, cache.topk and cache.errors. Start at `event`.
"""
