"""Filters: which items of a generation pass an expression over their attributes, and the best of those for a vector.

Imports cache.format and cache.model. Start at `expression`, then `masks`.
"""
