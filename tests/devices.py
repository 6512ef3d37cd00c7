"""The torch device that tests score on: LARDER_TEST_DEVICE (`cuda` on a machine with a GPU), else the processor."""

import os

DEVICE = os.environ.get("LARDER_TEST_DEVICE", "cpu")
