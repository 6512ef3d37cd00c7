"""Exact top-K by inner product on processors: the compiled kernel, FAISS where there is none, what both share.

Imports cache.model, cache.process and cache.format. Start at `topk`.
"""
