"""Kernels of the fused top-K, in Triton; without a GPU by its interpreter (TRITON_INTERPRET=1 before it is imported).

In their order: `above` multiplies and writes entries of groups, `keep` has the best of them, `keys` scores their items.
"""
