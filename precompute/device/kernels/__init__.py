"""Kernels of the fused top-K, in Triton.

Without a GPU they run by its interpreter (TRITON_INTERPRET=1 before it is imported). In their order: `above` multiplies
and writes entries of groups, `keep` has the best of them, `keys` scores their items.
"""
