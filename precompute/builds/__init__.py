"""Build of a generation: where its files lie while the night makes it, and what is swept before and after.

Start at `build`.
"""
