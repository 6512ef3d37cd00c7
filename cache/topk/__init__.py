"""Exact top-K by inner product on processors: the compiled kernel, FAISS where there is none, what both share.

Start at `topk`.
"""
