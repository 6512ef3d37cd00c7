"""Copies that a night may take from an earlier one: the base, what changed since, and the rule that decides.

Start at `prior` and `lists`.
"""
