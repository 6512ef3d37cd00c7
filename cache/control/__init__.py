"""Control keys in Redis, and the states of a generation that they tell of.

Start at `states`.
"""
