"""Options of the command `plan`, and its answer for a measured GPU, which needs no sample and few libraries."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cache.errors import BundleError, ConfigError
from precompute.planning.cards import CARDS, MEASURED_K, CardForecast, find_card

if TYPE_CHECKING:
    from precompute.config.console import CommandOutput
    from precompute.config.progress import Progress
    from precompute.config.settings import NightConfig

DESCRIPTION = (
    "forecast of a night and its service, from a sample of the real inputs: bytes in Redis, on readers' hosts and "
    "on disk, minutes of scoring and loading, hit rates of L1; fails if the generations of a night at its peak "
    "would not fit; with --card, only the time of lists on a GPU with measured rates, without a sample"
)

SAMPLE_OPTIONS = (
    "qps", "processes", "requests", "zipf", "answer_bytes", "gpu_users_per_s", "users_changed", "items_changed",
    "redis_gb", "redis_nodes", "host_gb", "disk_gb", "sample", "seconds", "data_until", "l1_mb",
)  # fmt: skip
"""Options that need a sample and are therefore refused with --card."""


@dataclass(frozen=True, slots=True)
class PlanParameters:
    """Parameters of the plan; None: the value is counted in the inputs, or the row is left out."""

    users: int | None = None
    items: int | None = None
    k: int | None = None
    dims: int | None = None
    qps: float | None = None
    processes: int = 1
    sample: float = 0.01
    seconds: float = 20.0
    data_until: str | None = None
    l1_mib: Sequence[int] = (64, 256, 1024)
    zipf: float = 1.0
    answer_bytes: int | None = None
    gpu_users_per_s: float | None = None
    users_changed: float | None = None
    items_changed: float | None = None


def add_options(command: argparse.ArgumentParser, card_command: object) -> None:
    """Add the options of `plan`; omitted sizes are counted in the inputs. `card_command` runs with --card."""
    default_parameters = PlanParameters()
    for option_name, value_type, metavar, help_text in (
        ("users", int, "N", "users (default: counted)"),
        ("items", int, "N", "items; scoring is extrapolated from half and all of the existing items"),
        ("k", int, "N", "length of the users' lists"),
        ("dims", int, "N", "dimensions of the vectors; scoring is extrapolated in proportion"),
        ("qps", float, "QPS", "requests per second, of all processes"),
        ("processes", int, "N", "service processes, each with an L1 (default 1)"),
        ("requests", str, "FILE", ("requested ids, one row per request: Parquet with the sources' user column, else "
         "text, one per line")),
        ("zipf", float, "S", ("without --requests: requests of the user of rank r are proportional to r ** -S "
         "(default 1.0)")),
        ("answer-bytes", int, "N", ("bytes of a single lookup's answer, cached besides its record; 0 if only batches "
         "are requested (default: from K and the ids)")),
        ("gpu-users-per-s", float, "RATE", "lists per second on GPUs (default: measured here, else from a table)"),
        ("users-changed", float, "SHARE", ("for nights that copy: share of the users with changed inputs (default: "
         "those with an interaction in the last day before the cut; 0.1 if no interaction has a time)")),
        ("items-changed", float, "SHARE", ("for nights that copy: share of the items removed, new or changed (default: "
         "nights for 0, 0.001 and 0.01)")),
        ("redis-gb", float, "GB", "memory of each Redis node (default: as the configured Redis reports)"),
        ("redis-nodes", int, "N", "primary nodes, with --redis-gb (default 1)"),
        ("host-gb", float, "GB", "memory of a reader's host (default: free on this host)"),
        ("disk-gb", float, "GB", "disk for the artefacts (default: free on this host)"),
        ("sample", float, "SHARE", "share of the users in the sample (default 0.01, at least 1,024 users)"),
        ("seconds", float, "S", "seconds to time the scoring of users, and of items (default 20)"),
        ("data-until", str, "TIME", "cut of the data, ISO 8601"),
    ):  # fmt: skip
        command.add_argument(
            f"--{option_name}", type=value_type, metavar=metavar, help=help_text,
            default=getattr(default_parameters, option_name.replace("-", "_"), None),
        )  # fmt: skip
    command.add_argument(
        "--card", metavar="NAME", action=_ChooseCard, const=card_command,
        help=(f"only the time of lists on a GPU with measured rates ({', '.join(sorted(CARDS))}), from a table: with "
        "--users, and --items and --dims unless the bundle has them"),
    )  # fmt: skip
    command.add_argument(
        "--l1-mb", type=int, nargs="+", metavar="MIB", default=list(default_parameters.l1_mib),
        help="sizes of L1 per process, in MiB (default 64 256 1024)",
    )  # fmt: skip


class _ChooseCard(argparse.Action):
    """Store --card and select the command that answers from a table, without a sample or Redis."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.run, namespace.redis = self.const, "none"


def read_parameters(arguments: argparse.Namespace) -> PlanParameters:
    """Return the parameters of a plan from the options; raise ConfigError for an option out of range."""
    positive_options = ("users", "items", "k", "dims", "qps", "processes", "gpu_users_per_s", "redis_gb", "redis_nodes",
             "host_gb", "disk_gb", "sample", "seconds")  # fmt: skip
    for option_name in positive_options:
        option_value = getattr(arguments, option_name)
        if option_value is not None and not 0 < option_value < math.inf:
            option = f"--{option_name.replace('_', '-')}"
            raise ConfigError(f"{option} must be a number above 0, not {option_value:g}", field=option_name)
    if arguments.sample > 1:
        raise ConfigError(f"--sample must be above 0 and at most 1, not {arguments.sample:g}", field="sample")
    if min(arguments.l1_mb) < 1:
        raise ConfigError("--l1-mb takes sizes of at least 1 MiB", field="l1_mb")
    if arguments.answer_bytes is not None and arguments.answer_bytes < 0:
        raise ConfigError("--answer-bytes must be 0 or more", field="answer_bytes")
    if not 0 <= arguments.zipf <= 10:
        raise ConfigError(f"--zipf must be 0 to 10, not {arguments.zipf:g}", field="zipf")
    for option_name in ("users_changed", "items_changed"):
        option_value = getattr(arguments, option_name)
        if option_value is not None and not 0 <= option_value <= 1:
            option = f"--{option_name.replace('_', '-')}"
            raise ConfigError(f"{option} must be from 0 to 1, not {option_value:g}", field=option_name)
    if arguments.redis_nodes is not None and arguments.redis_gb is None:
        raise ConfigError("--redis-nodes needs --redis-gb, the memory of each node", field="redis_nodes")
    return PlanParameters(
        arguments.users, arguments.items, arguments.k, arguments.dims, arguments.qps,
        arguments.processes, arguments.sample, arguments.seconds, arguments.data_until,
        tuple(arguments.l1_mb), arguments.zipf, arguments.answer_bytes, arguments.gpu_users_per_s,
        arguments.users_changed, arguments.items_changed,
    )  # fmt: skip


def demand_card_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no meaning with --card, or without the number of users."""
    default_parameters = PlanParameters()
    for option_name in SAMPLE_OPTIONS:
        unset_value = (
            list(default_parameters.l1_mib)
            if option_name == "l1_mb"
            else getattr(default_parameters, option_name, None)
        )
        if getattr(arguments, option_name) != unset_value:
            option = f"--{option_name.replace('_', '-')}"
            raise ConfigError(
                f"{option} cannot be used with --card, which reads a table: remove one of the two", field=option_name
            )
    if arguments.users is None:
        raise ConfigError("--card counts no users: give their number with --users", field="users")


def quick_answer(argv: Sequence[str]) -> str | None:
    """Return the answer to the arguments of `plan` if they name a card and all its numbers, else None.

    It takes milliseconds, since neither settings nor libraries are loaded. None also for invalid arguments: the full
    parser then reports the error.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--card", default="")
    for option_name in ("users", "items", "dims"):
        parser.add_argument(f"--{option_name}", type=int, default=0)
    parser.add_argument("--k", type=int, default=MEASURED_K)
    parser.add_argument("--json", action="store_true")
    try:
        options, unknown_arguments = parser.parse_known_args(argv)
        card = find_card(options.card)
    except (argparse.ArgumentError, ConfigError):
        return None
    if unknown_arguments or min(options.users, options.items, options.dims, options.k) < 1:
        return None
    return _card_text(card.forecast_night(options.users, options.items, options.dims, options.k), is_json=options.json)


def plan_on_card(config: "NightConfig", arguments: argparse.Namespace, _progress: "Progress") -> "CommandOutput":
    """Return the forecast of a night on the named GPU; raise ConfigError for a GPU without rates or a missing size."""
    from precompute.config.console import CommandOutput

    demand_card_options(arguments)
    card, plan_parameters = find_card(arguments.card), read_parameters(arguments)
    item_count, dims = _find_card_sizes(config, plan_parameters.items, plan_parameters.dims)
    forecast = card.forecast_night(plan_parameters.users or 0, item_count, dims, plan_parameters.k or MEASURED_K)
    return CommandOutput(_card_text(forecast, is_json=arguments.json))


def _find_card_sizes(config: "NightConfig", item_count: int | None, dims: int | None) -> tuple[int, int]:
    """Return (items, dimensions) as given, else from the bundle."""
    if item_count is not None and dims is not None:
        return item_count, dims
    from precompute.bundles.bundle import Bundle

    try:
        bundle = Bundle.open(config.path(config.bundle))
    except BundleError as error:
        raise ConfigError(
            f"--card needs --items and --dims if there is no bundle: {error.message}",
            field="items" if item_count is None else "dims",
        ) from error
    return item_count or bundle.items.item_count, dims or bundle.dims


def _card_text(forecast: CardForecast, *, is_json: bool) -> str:
    if is_json:
        return json.dumps({**asdict(forecast), "night_s": forecast.night_s}, indent=2)
    step_rows: tuple[tuple[str, float | None, str], ...] = (
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
    text_lines = [title]
    for step, seconds, remark in step_rows:
        seconds_text = "not measured" if seconds is None else f"{seconds:,.2f} s"
        text_lines.append(f"  {step:<20}{seconds_text:>14}  {remark}".rstrip())
    return "\n".join([*text_lines, *forecast.notes])
