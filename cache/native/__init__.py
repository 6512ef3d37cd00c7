"""Compiled functions for work that is too slow in numpy and Python, and their loader.

The C sources are in this folder. Each function has a counterpart in Python, in `pure`, with the same results. Start at
`loader`.
"""
