"""Control keys in Redis, and the states of a generation.

Start at `states`.
"""
