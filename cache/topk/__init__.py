"""Exact top-K by inner product on CPUs: the compiled kernel, or FAISS where the kernel is not built.

Start at `topk`.
"""
