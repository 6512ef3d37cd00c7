"""The torch device that tests score on: LARDER_TEST_DEVICE (`cuda` on a machine with a GPU), else the processor."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

DEVICE = os.environ.get("LARDER_TEST_DEVICE", "cpu")


def long_where_interpreted(test: Test) -> Test:
    """Mark a test that is slow under Triton's interpreter: it runs with the storm there, quickly on a GPU."""
    return pytest.mark.storm(test) if DEVICE == "cpu" else test


def long_case(*values: object) -> object:
    """Values of a parametrized test, marked as by `long_where_interpreted`."""
    return pytest.param(*values, marks=(pytest.mark.storm,) if DEVICE == "cpu" else ())
