"""Exact top-K on GPUs, by kernels of its own and by torch, and `torch.export` programs of towers.

Start at `scorer`; `fused` and `search` are two ways to the same lists.
"""
