"""Arrow IPC streams, read and written without pyarrow, which is larger than the whole service.

Start at `writer`.
"""
