"""Command `plan`: the forecast as a table or as JSON."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from cache.control.control_keys import Control
from cache.errors import SourceError
from cache.l2.sync_clients import connect
from cache.process.command_line import json_text
from precompute.bulk.headroom import ArmRoom
from precompute.config.console import OutputContent, out_console, print_output
from precompute.config.progress import Progress, size_text
from precompute.config.settings import NightConfig, peak_generation_count
from precompute.gates.evidence.candidate import Verdict
from precompute.planning.capacity import demand_room, limits_of
from precompute.planning.filter_costs import SHORT_LIST_ITEMS, FilterCost
from precompute.planning.forecast import DAY_S, Forecast, forecast, judged
from precompute.planning.options import PlanParameters, parameters
from precompute.planning.sizes import step_bytes
from precompute.planning.trial import TimeSpent
from precompute.sources.readers import read_features


def plan(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> OutputContent:
    """Show the forecast; raise Refused if it would not fit."""
    plan_parameters = parameters(arguments)
    if config.redis_url and arguments.redis_gb is None:  # before a minute's work
        with connect(config.redis_url, config.redis_timeout_s) as client:
            Control(client, config.keyspace()).check_policy()
    requests = None if arguments.requests is None else _counts(Path(arguments.requests), config)
    night_forecast = forecast(config, plan_parameters, requests, progress=progress)
    limits = limits_of(
        config, record_bytes=max(layout.size_bytes for _, layout in night_forecast.shape.layouts.values()),
        redis_gb=arguments.redis_gb, nodes=arguments.redis_nodes,
        host_gb=arguments.host_gb, disk_gb=arguments.disk_gb,
    )  # fmt: skip
    verdicts = judged(config, night_forecast, limits)
    generations = peak_generation_count(config.keep)
    output = (
        _json(night_forecast, verdicts, generations, limits.arms)
        if arguments.json
        else _tables(night_forecast, verdicts, plan_parameters, generations, limits.arms)
    )
    if not all(verdict.passed for verdict in verdicts):
        print_output(output, out_console)
        demand_room(verdicts)
    return output


def _counts(path: Path, config: NightConfig) -> NDArray[np.int64]:
    """Count the rows of each user in a log, int64; raise SourceError for a log that is unreadable or names no user."""
    try:
        if path.suffix in (".parquet", ".pq"):
            parts = [ids.texts() for ids, _ in read_features(path, config.sources.user_column, ())]
        else:
            named = pa.csv.ReadOptions(column_names=["user"])
            text = pa.csv.ConvertOptions(column_types={"user": pa.string()})
            lines = pa.csv.ParseOptions(
                quote_char=False
            )  # else a quote could take the lines behind it
            table = pa.csv.read_csv(path, named, lines, text)
            parts = table["user"].chunks
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"cannot read {path}: {error}", path=str(path)) from error
    counts = pc.value_counts(pa.chunked_array(parts, pa.string())).field("counts")
    if not len(counts):
        raise SourceError(f"{path} names no user", path=str(path))
    return np.asarray(counts, np.int64)


def _json(
    night_forecast: Forecast, verdicts: list[Verdict], generations: int, arms: Sequence[ArmRoom]
) -> OutputContent:
    report = {
        **night_forecast.to_json(),
        "generations": generations,
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "arms": [asdict(arm) for arm in arms],
    }
    return [escape(json_text(report))]


def _tables(
    night_forecast: Forecast,
    verdicts: list[Verdict],
    plan_parameters: PlanParameters,
    generations: int,
    arms: Sequence[ArmRoom],
) -> OutputContent:
    shape, timings = night_forecast.shape, night_forecast.timings
    shape_text = f"{shape.users:,} users, {shape.items:,} items of {shape.dims} dimensions"
    title = f"{shape_text}, from {night_forecast.sample_users:,} users"
    sizes = Table("what", "one generation", f"{generations} at the peak", title=title)
    for column in sizes.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, size in (
        ("Redis", night_forecast.redis_bytes),
        ("directories", shape.directory_bytes),
        ("a reader's host", shape.mapped_bytes),
        ("artefact store", shape.disk_bytes),
    ):
        sizes.add_row(name, size_text(size), size_text(generations * size))
    for arm in arms:
        name = f"Redis, {', '.join(arm.arms)}"
        peak = size_text(generations * arm.largest_bytes)
        sizes.add_row(escape(name), size_text(arm.largest_bytes), peak)
    times = Table("step", "minutes", "processor minutes", "of it")
    scoring = timings.all
    parts = {"items embedded": timings.embed, "users": timings.users, "items": timings.items}
    times.add_row(
        "score",
        *_minutes(scoring),
        ", ".join(f"{name} {timing.wall_s / 60:.2f}" for name, timing in parts.items()),
    )
    times.add_row(
        "score on GPUs",
        f"{night_forecast.gpu_s / 60:.2f}",
        "",
        f"by {escape(night_forecast.gpu_how)}",
    )
    times.add_row(
        "load",
        *_minutes(night_forecast.load),
        f"beside readers at most {night_forecast.floor_s / 60:.2f}",
    )
    copying = _copying(night_forecast)
    memory = Table("step", "memory at most")
    memory.columns[1].justify = "right"
    for step, found_bytes in step_bytes(shape).items():
        memory.add_row(step, size_text(found_bytes))
    rates = Table("L1 per process", "entries", "hits, L1 full", "hits, first day", "L2 reads/s")
    for hit_rates in night_forecast.hits:
        cold = "" if hit_rates.from_cold is None else f"{hit_rates.from_cold:.1%}"
        reads = (
            ""
            if plan_parameters.qps is None
            else f"{plan_parameters.qps * (1 - hit_rates.steady):,.0f}"
        )
        rates.add_row(
            size_text(hit_rates.max_bytes),
            f"{hit_rates.entries:,.0f}",
            f"{hit_rates.steady:.1%}",
            cold,
            reads,
        )
    filters = Table("table", "items that pass", "Redis", "processor minutes a night", "lists too short",
                    f"of {SHORT_LIST_ITEMS}", "search / read, ms", "pays")  # fmt: skip
    for filter_cost in night_forecast.filters:
        filters.add_row(
            escape(filter_cost.name), f"{filter_cost.passing_item_count:,}", size_text(filter_cost.redis_bytes),
            f"{filter_cost.night_s / 60:.2f}",
            f"{filter_cost.cut:.1%}", f"{filter_cost.cut_few:.1%}",
            f"{filter_cost.search_s * 1e3:.2f} / {filter_cost.read_s * 1e3:.2f}",
            _pays(filter_cost, plan_parameters.qps),
        )  # fmt: skip
    gates = Table("rule", "found", "allowed", "")
    for verdict in verdicts:
        refusal_label = "" if verdict.passed else "[red]refused[/red] "
        gates.add_row(
            verdict.rule,
            f"{verdict.value}",
            f"{verdict.threshold}",
            refusal_label + escape(verdict.note),
        )
    for column in (*times.columns[1:3], *rates.columns):
        column.justify, column.no_wrap = "right", True
    busy = "other programs were busy here meanwhile: by the clock, times are too long"
    notes = (
        [timings.note] * bool(timings.note)
        + [busy] * night_forecast.is_busy
        + [*night_forecast.remarks]
    )
    ahead = [filters] * bool(night_forecast.filters)
    return [sizes, times, *map(escape, notes), copying, memory, rates, *ahead, gates]


def _copying(night_forecast: Forecast) -> Table:
    """Render the scoring of a night that computes all, and of nights that copy unchanged users."""
    table = Table(
        "scoring", "users' inputs", "an item gone", "an item enters", "copied", "minutes",
        "processor minutes", title=f"a night that copies: {night_forecast.copying_note}",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    table.add_row("all computed", "", "", "", "0.0%", *_minutes(night_forecast.timings.all))
    for copying_night in night_forecast.copying:
        percentages = (
            f"{fraction:.1%}"
            for fraction in (
                copying_night.inputs,
                copying_night.lost,
                copying_night.entered,
                copying_night.copied,
            )
        )
        table.add_row(
            f"{100 * copying_night.items_changed:g}% of items changed",
            *percentages,
            *_minutes(copying_night.scoring),
        )
    return table


def _pays(filter_cost: FilterCost, qps: float | None) -> str:
    """Describe from how many lookups, relative to the stated load, a filtered table pays off, and if it is made."""
    break_even_text = "never: no list is too short"
    if not math.isinf(filter_cost.pays_from):
        break_even_text = f"from {filter_cost.pays_from:,.0f} lookups a day"
        if qps is not None:
            lookup_fraction = filter_cost.pays_from / (qps * DAY_S)
            break_even_text += (
                f", {lookup_fraction:.2%} of those stated"
                if lookup_fraction <= 1
                else ": more than those stated"
            )
    return f"{break_even_text} (made)" if filter_cost.is_made else break_even_text


def _minutes(spent: TimeSpent) -> tuple[str, str]:
    return f"{spent.wall_s / 60:.2f}", f"{spent.cpu_s / 60:.2f}"
