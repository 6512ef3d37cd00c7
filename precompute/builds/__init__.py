"""One build: where a generation's files lie while the night makes it, and what is swept before and after.

Imports partitions and releases. Start at `build`.
"""
