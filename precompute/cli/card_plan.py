"""The command `plan --card`: seconds of a night's lists on a GPU that was measured, by a table.

A line that says all numbers is answered in milliseconds, before settings and libraries are read (`quick_answer`).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from cache.errors import BundleError, ConfigError
from precompute.device.cards import MEASURED_K, CardForecast, find_card

if TYPE_CHECKING:
    from precompute.cli.console import CommandOutput
    from precompute.config.progress import Progress
    from precompute.config.settings import NightConfig


def quick_answer(argv: Sequence[str]) -> str | None:
    """The answer to the words behind `plan`, if they are --card with all its numbers.

    None where the settings are needed, or something is wrong, which the parser of all commands tells.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--card", default="")
    for name in ("users", "items", "dims"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--k", type=int, default=MEASURED_K)
    parser.add_argument("--json", action="store_true")
    try:
        options, unknown_arguments = parser.parse_known_args(argv)
        card = find_card(options.card)
    except (argparse.ArgumentError, ConfigError):
        return None
    if unknown_arguments or min(options.users, options.items, options.dims, options.k) < 1:
        return None
    return _text(
        card.night(options.users, options.items, options.dims, options.k), is_json=options.json
    )


def plan_on_card(
    config: "NightConfig", arguments: argparse.Namespace, _progress: "Progress"
) -> "CommandOutput":
    """Shows the forecast; raises ConfigError for a card without rates, and for what nothing says."""
    from precompute.cli.console import CommandOutput
    from precompute.planning.options import demand_card_options, parameters

    demand_card_options(arguments)
    card, plan_parameters = find_card(arguments.card), parameters(arguments)
    items, dims = _size(config, plan_parameters.items, plan_parameters.dims)
    forecast = card.night(plan_parameters.users or 0, items, dims, plan_parameters.k or MEASURED_K)
    return CommandOutput(_text(forecast, is_json=arguments.json))


def _size(config: "NightConfig", items: int | None, dims: int | None) -> tuple[int, int]:
    """(items, dimensions) as they were asked for, else of the bundle."""
    if items is not None and dims is not None:
        return items, dims
    from precompute.bundles.bundle import Bundle

    try:
        bundle = Bundle.open(config.path(config.bundle))
    except BundleError as error:
        raise ConfigError(
            f"--card needs --items and --dims where no bundle says them: {error.message}",
            field="items" if items is None else "dims",
        ) from error
    return items or bundle.items.count, dims or bundle.dims


def _text(forecast: CardForecast, *, is_json: bool) -> str:
    if is_json:
        return json.dumps({**asdict(forecast), "night_s": forecast.night_s}, indent=2)
    rows: tuple[tuple[str, float | None, str], ...] = (
        ("lists", forecast.topk_s, f"{forecast.users_per_s:,.0f} users/s"),
        ("begin", forecast.begin_s, "sources read and partitioned"),
        ("item vectors", forecast.embed_s, ""),
        ("partition to pages", forecast.pages_s, "the lists included"),
        ("sources to pages", forecast.night_s, "the three above"),
    )
    title = (
        f"one {forecast.card}: {forecast.users:,} users, {forecast.items:,} items of {forecast.dims} dimensions, "
        f"K = {forecast.k}"
    )
    lines = [title]
    for step, seconds, remark in rows:
        seconds_text = "not measured" if seconds is None else f"{seconds:,.2f} s"
        lines.append(f"  {step:<20}{seconds_text:>14}  {remark}".rstrip())
    return "\n".join([*lines, *forecast.notes])
