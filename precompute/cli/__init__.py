"""The command line: `python -m precompute`.

Imports every other room. Start at `parser`.
"""
