"""The torch device that tests score on: LARDER_TEST_DEVICE (`cuda` on a machine with a GPU), else the processor."""

import os

DEVICE = os.environ.get("LARDER_TEST_DEVICE", "cpu")
if DEVICE == "cpu":  # before triton is imported: its kernels then run as numpy does
    os.environ.setdefault("TRITON_INTERPRET", "1")
