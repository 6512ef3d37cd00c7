"""Words for what a night copied: its base, and its users by reason. Pure."""

from collections.abc import Mapping
from typing import Any

_REASONS = {
    "inputs": "for their inputs",
    "lost": "for an item gone or changed",
    "entered": "for one that may enter",
}


def users_in_words(users: Mapping[str, int]) -> str:
    """Users by reason, such as "360 copied, 40 computed (30 for their inputs, 10 for one that may enter)"."""
    copied = users.get("copied", 0)
    computed = sum(users.values()) - copied
    why = ", ".join(f"{users[name]:,} {text}" for name, text in _REASONS.items() if users.get(name))
    told = f"{copied:,} copied, {computed:,} computed"
    return f"{told} ({why})" if why else told


def base_in_words(noted: Mapping[str, Any]) -> str:
    """Base of a night as the report of `begin` has it, or why there is none, or why all files were read."""
    base, why = noted.get("generation"), noted.get("why", "")
    if base is None:
        return f"no copies: {why}" if why else "no copies"
    told = f"no lists copied, items and values from {base}: {why}" if why else f"copies from {base}"
    if noted.get("read_because"):
        told += f"; all files read: {noted['read_because']}"
    return told
