"""Compiled functions for work that numpy and Python are too slow for, and their loader.

The C sources are in this folder; every function has a twin in Python, in `pure`, that gives the same bytes.
Start at `loader`.
"""
