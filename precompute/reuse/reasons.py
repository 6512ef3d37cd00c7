"""Texts on a night's copies: its base, and the numbers of users by reason."""

from collections.abc import Mapping, Sequence

from precompute.builds.reports import NO_BASE_ENTRY, BaseEntry, BeginReport, ShardReport
from precompute.config.settings import NightConfig
from precompute.reuse.reuse_fact import users_by_reason

_TEXT_BY_REASON = {
    "inputs": "for their inputs",
    "lost": "for a removed or changed item in a list",
    "entered": "for an item that may enter a list",
}


def users_in_words(count_by_reason: Mapping[str, int]) -> str:
    """Format users by reason, such as "360 copied, 40 computed (40 for their inputs)"."""
    copied_count = count_by_reason.get("copied", 0)
    computed_count = sum(count_by_reason.values()) - copied_count
    reason_text = ", ".join(
        f"{count_by_reason[reason]:,} {text}" for reason, text in _TEXT_BY_REASON.items() if count_by_reason.get(reason)
    )
    summary = f"{copied_count:,} copied, {computed_count:,} computed"
    return f"{summary} ({reason_text})" if reason_text else summary


def base_in_words(base_entry: BaseEntry) -> str:
    """Describe the base of a night, or why there is none, or why all files were read."""
    base, reason = base_entry["generation"], base_entry["why"]
    if base is None:
        return f"no copies: {reason}" if reason else "no copies"
    summary = f"no lists copied, items and values from {base}: {reason}" if reason else f"copies from {base}"
    if base_entry["read_because"]:
        summary += f"; all files read: {base_entry['read_because']}"
    return summary


def base_remark(begin_report: BeginReport, _config: NightConfig) -> str:
    """Return the description of the base, after a line break."""
    return f"\n{base_in_words(begin_report.get('base') or NO_BASE_ENTRY)}"


def users_remark(reports: Sequence[ShardReport]) -> str:
    """Return the numbers of users by reason from the shards' reports, after a line break; empty without copies."""
    count_by_reason = users_by_reason(reports)
    if sum(count_by_reason.values()) <= count_by_reason["computed"]:
        return ""
    return f"\nusers: {users_in_words(count_by_reason)}"
