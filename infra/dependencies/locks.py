"""Lock files as the distributions that they name."""

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name

LOCKS_FOLDER = Path(__file__).parents[1] / "locks"
LOCK_NAMES = ("all", "serving", "airflow", "audit", "chart", "docs", "package")
"""The locks; the last four are of tools, each in an environment of its own."""
PIN_LINE_PATTERN = re.compile(r"^(?P<name>[\w.-]+)(?:\[[\w,-]+\])?==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+))?")


@dataclass(frozen=True)
class Pin:
    """Distribution that a lock names, for the machines that its marker names."""

    name: str
    version: str
    marker: str = ""

    def is_for_this_machine(self) -> bool:
        """True if this Python, on this system, installs it."""
        return not self.marker or Marker(self.marker).evaluate()


def parse_pins(lock_text: str) -> tuple[Pin, ...]:
    """All of a lock; raises `ValueError` where a line is neither one nor a hash of one."""
    parsed_pins = []
    for line in lock_text.splitlines():
        if match := PIN_LINE_PATTERN.match(line):
            name = canonicalize_name(match["name"])
            parsed_pins.append(Pin(name, match["version"], (match["marker"] or "").strip()))
        elif line.strip() and not line.lstrip().startswith(("--hash=", "#")):
            raise ValueError(f"no pinned distribution: {line!r}")
    return tuple(parsed_pins)


def read_lock(lock_name: str) -> tuple[Pin, ...]:
    """All that the lock of that name pins."""
    return parse_pins((LOCKS_FOLDER / f"{lock_name}.txt").read_text())
