"""The command `freshness`: what it found as tables or as JSON."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from cache.errors import ConfigError
from cache.topk.compiled import K_MAX
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.freshness.bootstrap import Estimate
from precompute.freshness.options import ReplayOptions
from precompute.freshness.replay import FreshnessReport, replay
from precompute.freshness.ways import EVENTS, STRATEGIES


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """`larder freshness`."""
    for name, maximum in (("days", 3650), ("k", K_MAX), ("users", 10_000_000), ("seed", 2**32 - 1)):
        value = getattr(arguments, name)
        if not (name != "seed") <= value <= maximum:
            minimum = int(name != "seed")
            raise ConfigError(f"--{name} is {minimum} to {maximum}, not {value}", field=name)
    if arguments.data:
        data = tuple(
            source_path if "://" in source_path else str(Path.cwd() / source_path)
            for source_path in arguments.data
        )
        config = replace(config, sources=replace(config.sources, interactions=data))
    options = ReplayOptions(
        arguments.days, arguments.k, arguments.users, arguments.seed, arguments.configured_bundle
    )
    report = replay(config, options, progress)
    return to_json(report) if arguments.json else tables(report)


def to_json(report: FreshnessReport) -> dict[str, Any]:
    """JSON-able form of a report."""
    return {
        **report.facts,
        "groups": [
            {
                "group": group.name,
                "targets": group.targets,
                "with_newer_events": group.with_newer,
                **{
                    measure: {refresh_policy.name: value.to_json() for refresh_policy, value in means.items()}
                    for measure, means in (
                        ("recall", group.recall), ("ndcg", group.ndcg), ("gain", group.gain),
                    )
                },
            }
            for group in report.groups
        ],
        "costs": [
            {
                "way": cost.strategy.name,
                "lists_a_day": round(cost.changed_per_day, 1),
                "lists_a_day_of_all": None if cost.all_per_day is None else round(cost.all_per_day, 1),
                "list_ms": round(cost.list_ms, 4),
                "seconds_a_day": round(cost.seconds_per_day, 3),
            }
            for cost in report.costs
        ],
    }  # fmt: skip


def tables(report: FreshnessReport) -> list[Table | str]:
    """Tables of a report: all targets by way, groups of targets, costs."""
    facts, everything = report.facts, report.groups[0]
    k = facts["k"]
    log = (
        f"{facts['users']:,} users, {facts['items']:,} items, {facts['interactions']:,} interactions from "
        f"{facts['from']} to {facts['until']} UTC; replayed from {facts['cut']} on: {facts['replayed']:,}, of which "
        f"{facts['of_items_unknown_at_the_cut']:,} with items that were not known yet."
    )
    model = (
        f"{escape(facts['model'])}, {facts['dims']} dimensions, trained {facts['trained']}. To be found are "
        f"{everything.targets:,} items that {facts['users_evaluated']:,} users took up, {everything.with_newer:,} of "
        "them after something else since the night."
    )
    by_way = _table(
        "lists by", f"recall@{k}", "95 %", f"NDCG@{k}", "95 %", "more than nights", "95 %"
    )
    for refresh_policy in STRATEGIES:
        gain = (everything.gain[refresh_policy],) if refresh_policy in everything.gain else ()
        means = (everything.recall[refresh_policy], everything.ndcg[refresh_policy], *gain)
        by_way.add_row(
            refresh_policy.text, *(text for estimate in means for text in _texts(estimate))
        )
    groups = _table(
        "items taken up", "number", "newer events", *(refresh_policy.text for refresh_policy in STRATEGIES),
        "events more than nights", "95 %",
    )  # fmt: skip
    for group in report.groups:
        recalls = (f"{group.recall[refresh_policy].value:.4f}" for refresh_policy in STRATEGIES)
        newer_percentage = f"{group.with_newer / group.targets:.0%}"
        groups.add_row(
            group.name,
            f"{group.targets:,}",
            newer_percentage,
            *recalls,
            *_texts(group.gain[EVENTS]),
        )
    costs = _table(
        "lists by", "lists a day, where inputs changed", "of all users", "ms a list", "s a day"
    )
    for cost in report.costs:
        all_lists_text = "" if cost.all_per_day is None else f"{cost.all_per_day:,.0f}"
        costs.add_row(
            cost.strategy.text, f"{cost.changed_per_day:,.0f}", all_lists_text, f"{cost.list_ms:.3f}",
            f"{cost.seconds_per_day:,.1f}",
        )  # fmt: skip
    return [log, model, by_way, f"Recall@{k} of parts:", groups, costs]


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, *numbers)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _texts(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.value:.4f}", f"{estimate.low:.4f} to {estimate.high:.4f}"
