"""Scopes: what a token may be used for. A route asks for exactly one."""

from collections.abc import Mapping
from typing import Literal

Scope = Literal["read", "score", "feedback", "events", "explain", "admin"]

SCOPES: Mapping[Scope, str] = {
    "read": "lookups, and which generations are served",
    "score": "candidates put in order",
    "feedback": "reports of what came of answers",
    "events": "events of users and items, taken in",
    "explain": "why an entity is answered as it is",
    "admin": "the dashboard's data",
}
"""Meaning by scope; `/healthz`, `/readyz`, `/metrics`, the dashboard's page and the documentation ask for none."""
