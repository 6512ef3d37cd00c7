"""Lists computed on request, by vectors: the best items that pass a filter, and a caller's candidates in order.

Start at `filtered_lookup`.
"""
