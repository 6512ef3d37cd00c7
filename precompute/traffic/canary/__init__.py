"""Canaries: a verified generation answers a share of the requests, and measures decide whether it is published.

Start at `trial`.
"""
