"""Lists made when they are asked for, by vectors: a caller's candidates in order, and the best of what passes a filter.

Imports lookup and everything below it. Start at `candidate_scoring`, then `filtered_lookup`.
"""
