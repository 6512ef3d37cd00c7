"""`larder check`: looks at what a night and the service need, and says of each whether it is ok, or what to do."""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cache.errors import LarderError
from cache.process.command_line import NOT_WELL, json_text
from cache.process.printable import printable_lines
from infra.cli.check.found import CheckResult, State
from infra.cli.check.night import look_at_bundle, look_at_sources, look_at_store
from infra.cli.check.platform import look_at_airflow, look_at_lineage, look_at_live
from infra.cli.check.redis import look_at_events, look_at_redis
from infra.cli.settings import night_settings

if TYPE_CHECKING:
    from cache.config.night import NightConfig


class CheckLine(NamedTuple):
    """State of one thing that was looked at, and in words what was found or is to be done."""

    what: str
    state: State
    told: str


def main(argv: Sequence[str], *, prog: str) -> int:
    """Exit code: 0 nothing is to be done, 3 something is."""
    args = argument_parser(prog).parse_args(argv)
    findings = [_run_check("settings", _settings)]
    if findings[0].state == "ok":
        config = night_settings()
        findings += [_run_check(name, partial(check, config)) for name, check in CHECKS.items()]
    if args.json:
        print(printable_lines(json_text([finding._asdict() for finding in findings])))
    else:
        for finding in findings:
            print(printable_lines(f"{finding.state:<9} {finding.what:<9} {finding.told}"))
    return NOT_WELL if any(finding.state == "to do" for finding in findings) else 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at settings, sources, bundle, Redis, that of events, the provider of live models, the "
        "artefact store, Airflow and lineage, and say of each whether it is ok, or what to do. Nothing is changed but "
        "that the store's folder is made. Exit code: 0 nothing is to be done, 3 something is.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _run_check(subject: str, check: Callable[[], CheckResult]) -> CheckLine:
    try:
        return CheckLine(subject, *check())
    except LarderError as error:
        return CheckLine(subject, "to do", error.message)
    except OSError as error:
        return CheckLine(subject, "to do", f"this machine refused: {error}")


def _settings() -> CheckResult:
    """The file and the environment, for night and service alike."""
    from cache.config.serving import ServingConfig

    night_settings()
    ServingConfig.load(os.environ)
    file = os.environ.get("LARDER_CONFIG")
    if not file:
        return "to do", "no larder.toml here, and no LARDER_CONFIG: `larder init` writes one"
    return "ok", file


CHECKS: dict[str, Callable[["NightConfig"], CheckResult]] = {
    "sources": look_at_sources,
    "bundle": look_at_bundle,
    "redis": look_at_redis,
    "events": look_at_events,
    "live": look_at_live,
    "store": look_at_store,
    "airflow": look_at_airflow,
    "lineage": look_at_lineage,
}
