"""`python -m tests.audit --seed N --minutes M [--scenario NAME]`: audits Larder as a stranger would."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
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
    parser.add_argument(
        "--keep", action="store_true", help="leave the folder of sources, store and logs"
    )
    parser.add_argument("--lanes", type=int, default=2, help="scenarios at a time")
    options = parser.parse_args()
    print(f"seed {options.seed}, scenarios {', '.join(options.scenario or ALL)}", flush=True)
    with scratch_folder(options.keep) as folder:
        report = run_audit(
            options.scenario, options.seed, options.minutes * 60, folder, options.lanes
        )
        if options.keep:
            print(f"folder {folder}")
    print("\n".join(report.lines()))
    return 0 if report.is_clean else 1


def run_audit(
    names: list[str] | None, seed: int, seconds: float, folder: Path, lanes: int = 1
) -> Report:
    """Run scenarios, by default all; return what was covered and violated.

    With two lanes the random mix goes on in one of them while the others follow each other in the other one.
    """
    names = list(names or ALL)
    deadline = time.monotonic() + seconds
    shares = [seconds if lanes > 1 and name == "mix" else seconds / len(names) for name in names]

    def run(place: int) -> Report:
        share = min(shares[place], deadline - time.monotonic())
        return run_scenario(names[place], folder / names[place], seed, share)

    report = Report(seed)
    with ThreadPoolExecutor(lanes) as pool:
        for part in pool.map(run, range(len(names))):
            report.add(part)
    return report


def run_scenario(name: str, folder: Path, seed: int, seconds: float) -> Report:
    """Run one scenario with Redis servers of its own; an error that ends it is a violation, too."""
    began = time.monotonic()
    report = Report(seed, scenario=name)
    servers = Servers.start(folder)
    try:
        SCENARIOS[name](Stage(folder, servers, report, seed, began + seconds))
    except Exception:
        report.violate(
            "scenario ended early", "it runs to its end", "", traceback.format_exc()[-4000:], []
        )
    finally:
        servers.stop()
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
