"""Usage: hot ids, reads of tables, and advice on the size of L1.

Start at `attach`.
"""
