"""Reader of lock files: the distributions that they pin."""

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name

LOCKS_FOLDER = Path(__file__).parents[1] / "locks"
LOCK_NAMES = ("all", "serving", "airflow", "audit", "chart", "docs", "package")
"""Names of the locks; the last four are for tools, each of which has a separate environment."""
PIN_LINE_PATTERN = re.compile(r"^(?P<name>[\w.-]+)(?:\[[\w,-]+\])?==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+))?")


@dataclass(frozen=True)
class Pin:
    """Pinned version of a distribution; `environment_marker` restricts it to some platforms or Python versions."""

    distribution_name: str
    pinned_version: str
    environment_marker: str = ""

    def is_for_this_machine(self) -> bool:
        """Return True if the marker applies to this Python and platform."""
        return not self.environment_marker or Marker(self.environment_marker).evaluate()


def parse_pins(lock_text: str) -> tuple[Pin, ...]:
    """Return all pins of a lock; raise ValueError for a line that is neither a pin, a hash nor a comment."""
    parsed_pins = []
    for line in lock_text.splitlines():
        if match := PIN_LINE_PATTERN.match(line):
            name = canonicalize_name(match["name"])
            parsed_pins.append(Pin(name, match["version"], (match["marker"] or "").strip()))
        elif line.strip() and not line.lstrip().startswith(("--hash=", "#")):
            raise ValueError(f"no pinned distribution: {line!r}")
    return tuple(parsed_pins)


def read_lock(lock_name: str) -> tuple[Pin, ...]:
    """Return all pins of the lock of that name."""
    return parse_pins((LOCKS_FOLDER / f"{lock_name}.txt").read_text())
