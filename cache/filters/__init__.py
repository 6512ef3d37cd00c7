"""Filters over the attributes of a generation's items, and re-rankings of lists.

Start at `expression`.
"""
