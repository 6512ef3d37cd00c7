"""Filters over the attributes of a generation's items, and other orders of a list.

Start at `expression`.
"""
