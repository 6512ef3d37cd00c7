"""Reading and writing of Arrow IPC streams without pyarrow, which is larger than the whole service.

Start at `writer`.
"""
