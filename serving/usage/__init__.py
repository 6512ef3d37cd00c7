"""Usage: hot ids, tables that are read, samples of answers, and the best size of L1.

Start at `request_observer`.
"""
