"""Access: who asks, by named tokens; what each may ask for, how much of it, and until when.

Imports serving.requests, serving.tracing, cache.config and cache.store. Start at `callers`.
"""
