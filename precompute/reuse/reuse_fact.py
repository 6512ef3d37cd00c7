"""Fact of a night's copies in the manifest: users by reason, seconds spared, and the same for earlier nights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cache.errors import LarderError
from cache.reuse import REUSE_FACT, REUSE_NIGHTS_MAX
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT, EMBED_ITEMS_REPORT, NO_BASE_ENTRY, ShardReport
from precompute.scoring.copies import REASON_NAMES

MEASURED_USERS: Final = 1_000
"""Computed users from which on a night's own seconds per user are used, instead of the base's."""


def reuse_facts(build: Build, reports: Sequence[ShardReport]) -> dict[str, Any]:
    """Return the fact of copies under its name in the manifest."""
    return {REUSE_FACT: build_reuse_fact(build, reports)}


def build_reuse_fact(build: Build, reports: Sequence[ShardReport]) -> dict[str, Any]:
    """Build the fact of a generation's copies from the reports of its shards.

    `users` are numbers by reason (all `computed` if nothing could be copied); `spared_s` are the seconds that towers
    and lists would have taken for the copied users.
    """
    begin_report, embed_report = (build.need_report(BEGIN_REPORT), build.need_report(EMBED_ITEMS_REPORT))
    base = begin_report.get("base") or NO_BASE_ENTRY
    base_fact = _read_base_fact(build, base["generation"])
    count_by_reason = users_by_reason(reports)
    computed_count = sum(count_by_reason.values()) - count_by_reason["copied"]
    busy_s = sum(report["users"]["seconds"][stage] for report in reports for stage in ("tower", "topk"))
    user_s = busy_s / max(1, computed_count)
    if computed_count < MEASURED_USERS and base_fact.get("user_s"):
        user_s = base_fact["user_s"]
    fact = {
        "base": base["generation"], "why": base["why"],
        "took_over": base["took_over"], "read_because": base["read_because"],
        "users": count_by_reason, "items": sum(report["items"].get("copied", 0) for report in reports),
        "item_vectors": embed_report.get("copied", 0), "user_s": user_s, "spared_s": count_by_reason["copied"] * user_s,
    }  # fmt: skip
    night_entry = {field_name: fact[field_name] for field_name in ("users", "spared_s")}
    return {**fact, "nights": [*base_fact.get("nights", ()), night_entry][-REUSE_NIGHTS_MAX:]}


def users_by_reason(reports: Iterable[ShardReport]) -> dict[str, int]:
    """Return users by reason over all shards; in a shard without copies all users are `computed`."""
    count_by_reason = dict.fromkeys((*REASON_NAMES, "computed"), 0)
    for users_report in (report["users"] for report in reports):
        for reason, user_count in (users_report.get("reasons") or {"computed": users_report["scored"]}).items():
            count_by_reason[reason] += user_count
    return count_by_reason


def _read_base_fact(build: Build, generation: str | None) -> Mapping[str, Any]:
    """Return the fact of the base's copies; empty if there is no base or it is gone."""
    if generation is None:
        return {}
    try:
        base_fact: Mapping[str, Any] = read_manifest(build.store, generation).facts.get(REUSE_FACT) or {}
    except LarderError:
        return {}
    return base_fact
