"""Finding of a look."""

from typing import Literal

State = Literal["ok", "to do", "not used"]
CheckResult = tuple[State, str]
"""State, and in words what was found or is to be done."""
