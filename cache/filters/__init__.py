"""Filters over the attributes of a generation's items, the best of what passes for a vector, and another order of it.

Imports cache.format and cache.model. Start at `expression`, then `masks`; `reranking` stands alone.
"""
