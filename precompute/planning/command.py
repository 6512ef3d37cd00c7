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
from precompute.planning.capacity import demand_room, find_limits
from precompute.planning.filter_costs import SHORT_LIST_ITEMS, FilterCost
from precompute.planning.forecast import DAY_S, Forecast, forecast, judge_forecast
from precompute.planning.options import PlanParameters, read_parameters
from precompute.planning.sizes import step_bytes
from precompute.planning.trial import TimeSpent
from precompute.sources.readers import read_features


def plan(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> OutputContent:
    """Return the forecast; if it does not fit, print it and raise Refused."""
    plan_parameters = read_parameters(arguments)
    if config.redis_url and arguments.redis_gb is None:  # checked first, as the forecast takes about a minute
        with connect(config.redis_url, config.redis_timeout_s) as client:
            Control(client, config.keyspace()).check_eviction_policy()
    request_counts = None if arguments.requests is None else _count_requests(Path(arguments.requests), config)
    night_forecast = forecast(config, plan_parameters, request_counts, progress=progress)
    limits = find_limits(
        config, record_bytes=max(layout.size_bytes for _, layout in night_forecast.shape.layout_by_table.values()),
        redis_gb=arguments.redis_gb, stated_nodes=arguments.redis_nodes,
        host_gb=arguments.host_gb, disk_gb=arguments.disk_gb,
    )  # fmt: skip
    verdicts = judge_forecast(config, night_forecast, limits)
    generation_count = peak_generation_count(config.keep)
    output = (
        _forecast_json(night_forecast, verdicts, generation_count, limits.arms)
        if arguments.json
        else _forecast_tables(night_forecast, verdicts, plan_parameters, generation_count, limits.arms)
    )
    if not all(verdict.passed for verdict in verdicts):
        print_output(output, out_console)
        demand_room(verdicts)
    return output


def _count_requests(path: Path, config: NightConfig) -> NDArray[np.int64]:
    """Count the requests of each user in a log, int64; raise SourceError if it is unreadable or names no user."""
    try:
        if path.suffix in (".parquet", ".pq"):
            user_id_chunks = [
                batch_ids.row_texts() for batch_ids, _ in read_features(path, config.sources.user_column, ())
            ]
        else:
            read_options = pa.csv.ReadOptions(column_names=["user"])
            convert_options = pa.csv.ConvertOptions(column_types={"user": pa.string()})
            parse_options = pa.csv.ParseOptions(quote_char=False)  # else a quote could swallow the following lines
            table = pa.csv.read_csv(path, read_options, parse_options, convert_options)
            user_id_chunks = table["user"].chunks
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"cannot read {path}: {error}", path=str(path)) from error
    request_counts = pc.value_counts(pa.chunked_array(user_id_chunks, pa.string())).field("counts")
    if not len(request_counts):
        raise SourceError(f"{path} names no user", path=str(path))
    return np.asarray(request_counts, np.int64)


def _forecast_json(
    night_forecast: Forecast, verdicts: list[Verdict], generation_count: int, arms: Sequence[ArmRoom]
) -> OutputContent:
    report = {
        **night_forecast.to_json(),
        "generations": generation_count,
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "arms": [asdict(arm) for arm in arms],
    }
    return [escape(json_text(report))]


def _forecast_tables(
    night_forecast: Forecast,
    verdicts: list[Verdict],
    plan_parameters: PlanParameters,
    generation_count: int,
    arms: Sequence[ArmRoom],
) -> OutputContent:
    shape, timings = night_forecast.shape, night_forecast.timings
    shape_text = f"{shape.user_count:,} users, {shape.item_count:,} items of {shape.dims} dimensions"
    title = f"{shape_text}, from {night_forecast.sample_user_count:,} users"
    size_table = Table("what", "one generation", f"{generation_count} at the peak", title=title)
    for column in size_table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row_name, size_bytes in (
        ("Redis", night_forecast.redis_bytes),
        ("directories", shape.directory_bytes),
        ("a reader's host", shape.mapped_bytes),
        ("artefact store", shape.disk_bytes),
    ):
        size_table.add_row(row_name, size_text(size_bytes), size_text(generation_count * size_bytes))
    for arm in arms:
        row_name = f"Redis, {', '.join(arm.arms)}"
        peak_text = size_text(generation_count * arm.largest_bytes)
        size_table.add_row(escape(row_name), size_text(arm.largest_bytes), peak_text)
    time_table = Table("step", "minutes", "processor minutes", "of it")
    scoring = timings.total
    timing_by_part = {"items embedded": timings.embed, "users": timings.users, "items": timings.items}
    time_table.add_row(
        "score",
        *_minute_texts(scoring),
        ", ".join(f"{row_name} {timing.wall_s / 60:.2f}" for row_name, timing in timing_by_part.items()),
    )
    time_table.add_row(
        "score on GPUs", f"{night_forecast.gpu_s / 60:.2f}", "", f"by {escape(night_forecast.gpu_rate_source)}"
    )
    time_table.add_row(
        "load", *_minute_texts(night_forecast.load_time), f"beside readers at most {night_forecast.load_s_max / 60:.2f}"
    )
    copying_table = _copying_table(night_forecast)
    memory_table = Table("step", "memory at most")
    memory_table.columns[1].justify = "right"
    for step, peak_bytes in step_bytes(shape).items():
        memory_table.add_row(step, size_text(peak_bytes))
    rate_table = Table("L1 per process", "entries", "hits, L1 full", "hits, first day", "L2 reads/s")
    for hit_rates in night_forecast.hit_rates:
        cold_rate_text = "" if hit_rates.from_cold is None else f"{hit_rates.from_cold:.1%}"
        reads_text = "" if plan_parameters.qps is None else f"{plan_parameters.qps * (1 - hit_rates.steady):,.0f}"
        rate_table.add_row(
            size_text(hit_rates.max_bytes),
            f"{hit_rates.entries:,.0f}",
            f"{hit_rates.steady:.1%}",
            cold_rate_text,
            reads_text,
        )
    filter_table = Table("table", "items that pass", "Redis", "processor minutes a night", "lists too short",
                    f"of {SHORT_LIST_ITEMS}", "search / read, ms", "pays")  # fmt: skip
    for filter_cost in night_forecast.filters:
        filter_table.add_row(
            escape(filter_cost.table_name), f"{filter_cost.passing_item_count:,}", size_text(filter_cost.redis_bytes),
            f"{filter_cost.night_cpu_s / 60:.2f}",
            f"{filter_cost.short_list_share:.1%}", f"{filter_cost.short_list_share_at_ten:.1%}",
            f"{filter_cost.search_cpu_s * 1e3:.2f} / {filter_cost.read_cpu_s * 1e3:.2f}",
            _break_even_in_words(filter_cost, plan_parameters.qps),
        )  # fmt: skip
    gate_table = Table("rule", "found", "allowed", "")
    for verdict in verdicts:
        refusal_label = "" if verdict.passed else "[red]refused[/red] "
        gate_table.add_row(
            verdict.rule, f"{verdict.measured_value}", f"{verdict.threshold}", refusal_label + escape(verdict.note)
        )
    for column in (*time_table.columns[1:3], *rate_table.columns):
        column.justify, column.no_wrap = "right", True
    busy_note = "other programs were busy here meanwhile: by the clock, times are too long"
    notes = (
        [timings.extrapolation_note] * bool(timings.extrapolation_note)
        + [busy_note] * night_forecast.is_busy
        + [*night_forecast.remarks]
    )
    filter_tables = [filter_table] * bool(night_forecast.filters)
    return [
        size_table,
        time_table,
        *map(escape, notes),
        copying_table,
        memory_table,
        rate_table,
        *filter_tables,
        gate_table,
    ]


def _copying_table(night_forecast: Forecast) -> Table:
    """Render the scoring of a night that computes all, and of nights that copy unchanged users."""
    table = Table(
        "scoring", "users' inputs", "an item gone", "an item enters", "copied", "minutes",
        "processor minutes", title=f"a night that copies: {night_forecast.copying_note}",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    table.add_row("all computed", "", "", "", "0.0%", *_minute_texts(night_forecast.timings.total))
    for copying_night in night_forecast.copying_nights:
        percentages = (
            f"{fraction:.1%}"
            for fraction in (copying_night.inputs, copying_night.lost, copying_night.entered, copying_night.copied)
        )
        table.add_row(
            f"{100 * copying_night.items_changed:g}% of items changed",
            *percentages,
            *_minute_texts(copying_night.scoring),
        )
    return table


def _break_even_in_words(filter_cost: FilterCost, qps: float | None) -> str:
    """Describe the number of lookups from which a filtered table pays off, and whether the night makes it."""
    break_even_text = "never: no list is too short"
    if not math.isinf(filter_cost.pays_from_lookups):
        break_even_text = f"from {filter_cost.pays_from_lookups:,.0f} lookups a day"
        if qps is not None:
            lookup_fraction = filter_cost.pays_from_lookups / (qps * DAY_S)
            break_even_text += (
                f", {lookup_fraction:.2%} of those stated" if lookup_fraction <= 1 else ": more than those stated"
            )
    return f"{break_even_text} (made)" if filter_cost.is_made_by_night else break_even_text


def _minute_texts(spent: TimeSpent) -> tuple[str, str]:
    return f"{spent.wall_s / 60:.2f}", f"{spent.cpu_s / 60:.2f}"
