"""Progress of a step while it works, and sizes in words."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Callback (label, completed, total), called often and from one thread, which may draw the progress."""


def quiet(_label: str, _completed: int, _total: int) -> None:
    """A `Progress` that shows nothing."""


def size_text(size_bytes: float) -> str:
    """Return a size as text in binary units, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:,.1f} {unit}" if unit != "B" else f"{size_bytes:,.0f} B"
        size_bytes /= 1024
    raise AssertionError
