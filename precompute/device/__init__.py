"""Exact top-K on GPUs, by torch.

Imports topk. Start at `scorer`.
"""
