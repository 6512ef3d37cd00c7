"""Arrow IPC streams, read and written without pyarrow, which is larger than the whole service.

Imports nothing of the other rooms. Start at `writer`.
"""
