"""`python -m tests.audit --seed N --minutes M [--scenario NAME]`: audits Larder as a stranger would."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from tests.audit.processes import scratch_folder
from tests.audit.report import Report
from tests.audit.scenarios import SCENARIOS
from tests.audit.scenarios.stage import Stage
from tests.audit.shop import Servers


def main() -> int:
    """Run scenarios until the minutes are over; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument(
        "--keep", action="store_true", help="leave the folder of sources, store and logs"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}, scenarios {', '.join(options.scenario or SCENARIOS)}", flush=True)
    with scratch_folder(options.keep) as folder:
        report = run_audit(options.scenario, options.seed, options.minutes * 60, folder)
        if options.keep:
            print(f"folder {folder}")
    print("\n".join(report.lines()))
    return 0 if report.is_clean else 1


def run_audit(names: list[str] | None, seed: int, seconds: float, folder: Path) -> Report:
    """Run scenarios (by default all), which share the time; return what was covered and violated."""
    report = Report(seed)
    deadline = time.monotonic() + seconds
    names = list(names or SCENARIOS)
    for place, name in enumerate(names):
        began = time.monotonic()
        run_scenario(name, folder / name, report, (deadline - began) / (len(names) - place))
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return report


def run_scenario(name: str, folder: Path, report: Report, seconds: float) -> None:
    """Run one scenario with Redis servers of its own; an error that ends it is a violation, too."""
    servers = Servers.start(folder)
    report.scenario = name
    try:
        SCENARIOS[name](Stage(folder, servers, report, report.seed, time.monotonic() + seconds))
    except Exception:
        report.violate(
            "scenario ended early", "it runs to its end", "", traceback.format_exc()[-4000:], []
        )
    finally:
        servers.stop()


if __name__ == "__main__":
    sys.exit(main())
