"""The fact of a night's copies: users by reason, seconds spared, and the same of the nights before it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cache.errors import LarderError
from cache.format.reuse import FACT, NIGHTS
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build

COPIED, INPUTS, LOST, ENTERED = range(4)
REASONS: Final = ("copied", "inputs", "lost", "entered")
"""Reasons by number: copied; or computed for its inputs, for an item of its list, for one that could enter it."""

MEASURED_USERS: Final = 1_000
"""Computed users from which on a night's own time for each is believed."""


def reuse_of(made: Build, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fact of a generation, from the reports of its shards.

    `users` by reason (all of them `computed` where nothing could be copied), `spared_s` the seconds that towers and
    lists of those who were copied would have taken.
    """
    begun, embedded = made.need("begin"), made.need("embed_items")
    noted = begun.get("base") or {}
    before = _before(made, noted.get("generation"))
    users = users_by_reason(reports)
    computed = sum(users.values()) - users["copied"]
    busy_s = sum(
        report["users"]["seconds"][stage] for report in reports for stage in ("tower", "topk")
    )
    user_s = busy_s / max(1, computed)
    if computed < MEASURED_USERS and before.get("user_s"):
        user_s = before["user_s"]
    found = {
        "base": noted.get("generation"), "why": noted.get("why", ""),
        "took_over": noted.get("took_over", False), "read_because": noted.get("read_because", ""),
        "users": users, "items": sum(report["items"].get("copied", 0) for report in reports),
        "item_vectors": embedded.get("copied", 0), "user_s": user_s, "spared_s": users["copied"] * user_s,
    }  # fmt: skip
    night = {name: found[name] for name in ("users", "spared_s")}
    return {**found, "nights": [*before.get("nights", ()), night][-NIGHTS:]}


def users_by_reason(reports: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Users by reason of all shards; all of one where nothing could be copied are `computed`."""
    users = dict.fromkeys((*REASONS, "computed"), 0)
    for each in (report["users"] for report in reports):
        for name, count in (each.get("reasons") or {"computed": each["scored"]}).items():
            users[name] += count
    return users


def _before(made: Build, generation: str | None) -> Mapping[str, Any]:
    """The fact of the base, empty where there is none or it is gone."""
    if generation is None:
        return {}
    try:
        found: Mapping[str, Any] = read_manifest(made.store, generation).facts.get(FACT) or {}
    except LarderError:
        return {}
    return found
