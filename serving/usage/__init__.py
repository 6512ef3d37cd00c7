"""Usage: hot ids, tables that are read, and the best size of L1.

Start at `attach`.
"""
