"""Towers and the exact top-K on GPUs.

Imports topk. Start at `scorer`.
"""
