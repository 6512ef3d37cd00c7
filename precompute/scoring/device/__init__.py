"""Exact top-K on a torch device: approximate products choose candidates, certified; the exact scores decide."""
