"""The command line: `python -m precompute`.

Start at `parser`.
"""
