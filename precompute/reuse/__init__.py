"""Copies from an earlier generation: the base, its changes to this night, and the rule that decides what is copied.

Start at `prior` and `lists`.
"""
