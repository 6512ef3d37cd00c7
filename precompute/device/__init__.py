"""Exact top-K on GPUs, by fused kernels or by torch's operators, and `torch.export` programs of towers.

Start at `scorer`; `fused` and `search` are two ways to compute the same lists.
"""
