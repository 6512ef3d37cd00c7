"""Canaries: a share of the requests tries a verified generation, and figures decide what becomes of it.

Start at `trial`.
"""
