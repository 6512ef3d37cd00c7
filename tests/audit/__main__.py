"""`python -m tests.audit --seed N --minutes M [--scenario NAME]`: audits Larder from outside, by its documents."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.audit.processes import scratch_folder
from tests.audit.report import Report
from tests.audit.scenarios import ALL, SCENARIOS
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import Servers


def main() -> int:
    """Run scenarios until the minutes are over; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--keep", action="store_true", help="leave the folder of sources, store and logs")
    parser.add_argument("--lanes", type=int, default=2, help="scenarios at a time")
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    options = parser.parse_args()
    print(f"seed {options.seed}, scenarios {', '.join(options.scenario or ALL)}", flush=True)
    with scratch_folder(options.keep) as folder:
        report = run_audit(options.scenario, options.seed, options.minutes * 60, folder, options.lanes, options.first)
        if options.keep:
            print(f"folder {folder}")
    print("\n".join(report.lines()))
    return 0 if report.is_clean else 1


def run_audit(
    names: list[str] | None, seed: int, seconds: float, folder: Path, lanes: int = 1, ends_at_first: bool = False
) -> Report:
    """Run scenarios, by default all; return what was covered and violated.

    With two lanes the random mix goes on in one of them while the others follow each other in the other one.
    """
    names = list(names or ALL)
    deadline = time.monotonic() + seconds
    budgets_s = [seconds if lanes > 1 and name == "mix" else seconds / len(names) for name in names]

    reports = {name: Report(seed, scenario=name) for name in names}

    def has_enough() -> bool:
        return ends_at_first and any(not report.is_clean for report in reports.values())

    def run(scenario_index: int) -> None:
        if not has_enough():
            budget_s = min(budgets_s[scenario_index], deadline - time.monotonic())
            name = names[scenario_index]
            run_scenario(name, folder / name, reports[name], budget_s, has_enough)

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(run, range(len(names))))
    combined_report = Report(seed)
    for report in reports.values():
        combined_report.add(report)
    return combined_report


def run_scenario(name: str, folder: Path, report: Report, seconds: float, has_enough: Callable[[], bool]) -> None:
    """Run one scenario with Redis servers of its own; an error that ends it is a violation, too."""
    started_at = time.monotonic()
    servers = Servers.start(folder)
    try:
        SCENARIOS[name](Stage(folder, servers, report, report.seed, started_at + seconds, has_enough))
    except Exception:
        report.violate("scenario ended early", "it runs to its end", "", traceback.format_exc()[-4000:], [])
    finally:
        servers.stop()
    print(f"{name}: {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
