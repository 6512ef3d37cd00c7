"""Progress of a step while it works, and the result it hands on."""

from collections.abc import Callable
from typing import Any

Step = dict[str, Any]
"""Result that a step hands on: small and JSON-able."""

Progress = Callable[[str, int, int], None]
"""Callback (what, done, total): called often, from one thread; drawing is the caller's business."""


def quiet(_label: str, _completed: int, _total: int) -> None:
    """A `Progress` that shows nothing."""
