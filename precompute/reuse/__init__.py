"""Copies that a night may take from an earlier one: the base, what changed since, and the rule that decides.

Imports what is below `scoring`. Start at `base`, then `lists`, whose rule is the reason why a copy is as good.
"""
