"""Lists made when they are asked for, by vectors: the best of what passes a filter, and a caller's candidates in order.

Start at `filtered_lookup`.
"""
