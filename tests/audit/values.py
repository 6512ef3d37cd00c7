"""Types that the audit's modules share."""

from __future__ import annotations

from typing import Any

Vector = tuple[float, ...]
Attribute = str | float | bool | list[str]
Json = dict[str, Any]
"""A JSON object as requests and answers have it."""
