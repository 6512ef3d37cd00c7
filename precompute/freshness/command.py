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
from precompute.freshness.ways import EVENTS, WAYS


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """`larder freshness`."""
    for name, most in (("days", 3650), ("k", K_MAX), ("users", 10_000_000), ("seed", 2**32 - 1)):
        value = getattr(arguments, name)
        if not (name != "seed") <= value <= most:
            least = int(name != "seed")
            raise ConfigError(f"--{name} is {least} to {most}, not {value}", field=name)
    if arguments.data:
        data = tuple(each if "://" in each else str(Path.cwd() / each) for each in arguments.data)
        config = replace(config, sources=replace(config.sources, interactions=data))
    options = ReplayOptions(
        arguments.days, arguments.k, arguments.users, arguments.seed, arguments.configured_bundle
    )
    found = replay(config, options, progress)
    return to_json(found) if arguments.json else tables(found)


def to_json(found: FreshnessReport) -> dict[str, Any]:
    """JSON-able form of a report."""
    return {
        **found.facts,
        "groups": [
            {
                "group": each.name,
                "targets": each.targets,
                "with_newer_events": each.with_newer,
                **{
                    measure: {way.name: value.to_json() for way, value in means.items()}
                    for measure, means in (
                        ("recall", each.recall), ("ndcg", each.ndcg), ("gain", each.gain),
                    )
                },
            }
            for each in found.groups
        ],
        "costs": [
            {
                "way": each.way.name,
                "lists_a_day": round(each.changed_per_day, 1),
                "lists_a_day_of_all": None if each.all_per_day is None else round(each.all_per_day, 1),
                "list_ms": round(each.list_ms, 4),
                "seconds_a_day": round(each.seconds_per_day, 3),
            }
            for each in found.costs
        ],
    }  # fmt: skip


def tables(found: FreshnessReport) -> list[Table | str]:
    """Tables of a report: all targets by way, groups of targets, costs."""
    facts, everything = found.facts, found.groups[0]
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
    for way in WAYS:
        gain = (everything.gain[way],) if way in everything.gain else ()
        means = (everything.recall[way], everything.ndcg[way], *gain)
        by_way.add_row(way.text, *(text for each in means for text in _texts(each)))
    groups = _table(
        "items taken up", "number", "newer events", *(way.text for way in WAYS), "events more than nights", "95 %",
    )  # fmt: skip
    for each in found.groups:
        recalls = (f"{each.recall[way].value:.4f}" for way in WAYS)
        newer = f"{each.with_newer / each.targets:.0%}"
        groups.add_row(each.name, f"{each.targets:,}", newer, *recalls, *_texts(each.gain[EVENTS]))
    costs = _table(
        "lists by", "lists a day, where inputs changed", "of all users", "ms a list", "s a day"
    )
    for cost in found.costs:
        everybody = "" if cost.all_per_day is None else f"{cost.all_per_day:,.0f}"
        costs.add_row(
            cost.way.text, f"{cost.changed_per_day:,.0f}", everybody, f"{cost.list_ms:.3f}",
            f"{cost.seconds_per_day:,.1f}",
        )  # fmt: skip
    return [log, model, by_way, f"Recall@{k} of parts:", groups, costs]


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, *numbers)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _texts(each: Estimate) -> tuple[str, str]:
    return f"{each.value:.4f}", f"{each.low:.4f} to {each.high:.4f}"
