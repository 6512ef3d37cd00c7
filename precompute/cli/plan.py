"""The command `plan`: the forecast as a table or as JSON."""

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

from cache.errors import SourceError
from cache.process.command_line import json_text
from precompute.builds.night import size_text
from precompute.cli.console import Found, out, show
from precompute.config.generations_at_peak import generations_at_peak
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control, connect
from precompute.experiments.room import ArmRoom
from precompute.gates.evidence.verdict import Verdict
from precompute.planning.capacity import demand_room, limits_of
from precompute.planning.filter_costs import FEW, FilterCost
from precompute.planning.forecast import DAY_S, Forecast, forecast, judged
from precompute.planning.memory import step_bytes
from precompute.planning.options import PlanParameters, parameters
from precompute.planning.spent import Spent
from precompute.sources.readers import read_features


def plan(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> Found:
    """Shows the forecast; raises Refused where it would not fit."""
    asked = parameters(arguments)
    if config.redis_url and arguments.redis_gb is None:  # before a minute's work
        with connect(config.redis_url, config.redis_timeout_s) as client:
            Control(client, config.keyspace()).check_policy()
    requests = None if arguments.requests is None else _counts(Path(arguments.requests), config)
    found = forecast(config, asked, requests, progress=progress)
    limits = limits_of(
        config, record_bytes=max(each.size_bytes for _, each in found.shape.layouts.values()),
        redis_gb=arguments.redis_gb, nodes=arguments.redis_nodes,
        host_gb=arguments.host_gb, disk_gb=arguments.disk_gb,
    )  # fmt: skip
    verdicts = judged(config, found, limits)
    generations = generations_at_peak(config.keep)
    shown = (
        _json(found, verdicts, generations, limits.arms)
        if arguments.json
        else _tables(found, verdicts, asked, generations, limits.arms)
    )
    if not all(each.passed for each in verdicts):
        show(shown, out)
        demand_room(verdicts)
    return shown


def _counts(path: Path, config: NightConfig) -> NDArray[np.int64]:
    """Counts of each id in a log, int64; raises SourceError for a log that cannot be read or names no user."""
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
    found: Forecast, verdicts: list[Verdict], generations: int, arms: Sequence[ArmRoom]
) -> Found:
    told = {
        **found.to_json(),
        "generations": generations,
        "verdicts": [each.to_json() for each in verdicts],
        "arms": [asdict(each) for each in arms],
    }
    return [escape(json_text(told))]


def _tables(
    found: Forecast,
    verdicts: list[Verdict],
    asked: PlanParameters,
    generations: int,
    arms: Sequence[ArmRoom],
) -> Found:
    shape, timings = found.shape, found.timings
    counted = f"{shape.users:,} users, {shape.items:,} items of {shape.dims} dimensions"
    title = f"{counted}, from {found.sample_users:,} users"
    sizes = Table("what", "one generation", f"{generations} at the peak", title=title)
    for column in sizes.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, size in (
        ("Redis", found.redis_bytes),
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
        ", ".join(f"{name} {each.wall_s / 60:.2f}" for name, each in parts.items()),
    )
    times.add_row("score on GPUs", f"{found.gpu_s / 60:.2f}", "", f"by {escape(found.gpu_how)}")
    times.add_row("load", *_minutes(found.load), f"beside readers at most {found.floor_s / 60:.2f}")
    copying = _copying(found)
    memory = Table("step", "memory at most")
    memory.columns[1].justify = "right"
    for step, found_bytes in step_bytes(shape).items():
        memory.add_row(step, size_text(found_bytes))
    rates = Table("L1 per process", "entries", "hits, L1 full", "hits, first day", "L2 reads/s")
    for each in found.hits:
        cold = "" if each.from_cold is None else f"{each.from_cold:.1%}"
        reads = "" if asked.qps is None else f"{asked.qps * (1 - each.steady):,.0f}"
        rates.add_row(
            size_text(each.max_bytes), f"{each.entries:,.0f}", f"{each.steady:.1%}", cold, reads
        )
    filters = Table("table", "items that pass", "Redis", "processor minutes a night", "lists too short",
                    f"of {FEW}", "search / read, ms", "pays")  # fmt: skip
    for one in found.filters:
        filters.add_row(
            escape(one.name), f"{one.passing:,}", size_text(one.redis_bytes), f"{one.night_s / 60:.2f}",
            f"{one.cut:.1%}", f"{one.cut_few:.1%}", f"{one.search_s * 1e3:.2f} / {one.read_s * 1e3:.2f}",
            _pays(one, asked.qps),
        )  # fmt: skip
    gates = Table("rule", "found", "allowed", "")
    for verdict in verdicts:
        mark = "" if verdict.passed else "[red]refused[/red] "
        gates.add_row(
            verdict.rule, f"{verdict.value}", f"{verdict.threshold}", mark + escape(verdict.note)
        )
    for column in (*times.columns[1:3], *rates.columns):
        column.justify, column.no_wrap = "right", True
    busy = "other programs were busy here meanwhile: by the clock, times are too long"
    notes = [timings.note] * bool(timings.note) + [busy] * found.is_busy + [*found.remarks]
    ahead = [filters] * bool(found.filters)
    return [sizes, times, *map(escape, notes), copying, memory, rates, *ahead, gates]


def _copying(found: Forecast) -> Table:
    """Scoring of a night that computes all, and of nights that copy what did not change."""
    table = Table(
        "scoring", "users' inputs", "an item gone", "an item enters", "copied", "minutes",
        "processor minutes", title=f"a night that copies: {found.copying_note}",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    table.add_row("all computed", "", "", "", "0.0%", *_minutes(found.timings.all))
    for each in found.copying:
        shares = (f"{share:.1%}" for share in (each.inputs, each.lost, each.entered, each.copied))
        table.add_row(
            f"{100 * each.items_changed:g}% of items changed", *shares, *_minutes(each.scoring)
        )
    return table


def _pays(one: FilterCost, qps: float | None) -> str:
    """Number of lookups from which a table under a filter pays, beside those stated, and whether it is made."""
    told = "never: no list is too short"
    if not math.isinf(one.pays_from):
        told = f"from {one.pays_from:,.0f} lookups a day"
        if qps is not None:
            share = one.pays_from / (qps * DAY_S)
            told += f", {share:.2%} of those stated" if share <= 1 else ": more than those stated"
    return f"{told} (made)" if one.is_made else told


def _minutes(spent: Spent) -> tuple[str, str]:
    return f"{spent.wall_s / 60:.2f}", f"{spent.cpu_s / 60:.2f}"
