"""Towers and the exact top-K on GPUs, by kernels of its own and by torch.

Start at `scorer`; `fused` and `search` are two ways to the same lists.
"""
